#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>

namespace kvswap {

// Why something has failed, as text. Making or copying one never throws, because a job must be able
// to end when host memory has run out; then a literal takes the place of the text.
class Reason {
 public:
  // Decides which exception Python raises.
  enum class Kind { kOther, kDeviceLost, kSourceFailed, kRejected, kCorrupted };

  static constexpr const char* kOutOfMemory = "out of host memory";

  Reason() = default;  // nothing has failed
  explicit Reason(const std::exception& error) noexcept {
    if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
      say(kOutOfMemory);
    } else {
      make([&] { return std::string(error.what()); }, kOutOfMemory);
    }
  }
  // text: called for the string. otherwise: a literal, used if there is no memory for the string.
  template <typename Text>
  Reason(const Text& text, const char* otherwise, Kind kind = Kind::kOther) noexcept : kind_(kind) {
    make(text, otherwise);
  }

  bool empty() const { return text_ == nullptr; }
  const char* c_str() const { return text_.get(); }
  Kind kind() const { return kind_; }

 private:
  template <typename Text>
  void make(const Text& text, const char* otherwise) noexcept {
    try {
      const auto made = std::make_shared<const std::string>(text());
      text_ = std::shared_ptr<const char>(made, made->c_str());
    } catch (const std::bad_alloc&) {
      say(otherwise);
    }
  }
  void say(const char* literal) noexcept {
    text_ = std::shared_ptr<const char>(std::shared_ptr<void>(), literal);  // owns nothing
  }

  std::shared_ptr<const char> text_;
  Kind kind_ = Kind::kOther;
};

}  // namespace kvswap
