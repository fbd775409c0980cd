#pragma once

// What a call of the driver returns.
namespace simulated {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3,
              kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500, kNotReady = 600,
              kAlreadyRegistered = 712, kNotRegistered = 713, kNotSupported = 801,
              kCaptureUnsupported = 900, kCaptureIsolation = 905;

}  // namespace simulated
