#pragma once

// What a call of the driver returns.
namespace simulated {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3,
              kInvalidDevice = 101, kInvalidContext = 201, kPeerAccessUnsupported = 217,
              kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kPeerAccessEnabled = 704,
              kAlreadyRegistered = 712, kNotRegistered = 713, kNotSupported = 801,
              kCaptureUnsupported = 900, kCaptureIsolation = 905;

}  // namespace simulated
