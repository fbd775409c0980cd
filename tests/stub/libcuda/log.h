#pragma once

#include <sstream>
#include <string>

// What the tests read: a line for each call, and what no correct program does.
namespace stub {

class Log {
 public:
  template <typename... Parts>
  void add(const Parts&... parts) {
    ((text_ << parts), ...);
    text_ << "\n";
  }

  // CUDA takes it and does something else than was meant.
  template <typename... Parts>
  void violation(const Parts&... parts) {
    ++violations_;
    add("VIOLATION: ", parts...);
  }

  int violations() const { return violations_; }

  std::string take() {
    const std::string taken = text_.str();
    text_.str("");
    return taken;
  }

  void clear() {
    take();
    violations_ = 0;
  }

 private:
  std::ostringstream text_;
  int violations_ = 0;
};

}  // namespace stub
