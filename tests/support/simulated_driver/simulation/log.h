#pragma once

#include <sstream>
#include <string>
#include <vector>

// What the tests read: a line for each call, and what no correct program does.
namespace simulated {

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
    std::ostringstream line;
    ((line << parts), ...);
    violations_.push_back(line.str());
    add("VIOLATION: ", line.str());
  }

  const std::vector<std::string>& violations() const { return violations_; }

  std::string take() {
    const std::string taken = text_.str();
    text_.str("");
    return taken;
  }

  void clear() {
    take();
    violations_.clear();
  }

 private:
  std::ostringstream text_;
  std::vector<std::string> violations_;
};

}  // namespace simulated
