// libgmlake's statuses, as the errors that torch's callers expect.
#pragma once

#include <string>

#include <gmlake.h>

#include "torch.h"

namespace glake {

/// The text of this thread's last failure. Copy it before the next call: the library keeps one.
inline std::string last_error() {
  const char* text = gmlake_last_error();
  return text == nullptr ? std::string("libgmlake gave no reason") : std::string(text);
}

/// Out of memory is torch.OutOfMemoryError, what is not offered is NotImplementedError, all else RuntimeError.
[[noreturn]] inline void raise(int32_t status, const std::string& text) {
  TORCH_CHECK_WITH(OutOfMemoryError, status != GLAKE_OUT_OF_MEMORY, text);
  TORCH_CHECK_NOT_IMPLEMENTED(status != GLAKE_UNSUPPORTED, text);
  C10_THROW_ERROR(Error, text);
}

inline void check(int32_t status) {
  if (C10_UNLIKELY(status != GLAKE_OK)) {
    raise(status, last_error());
  }
}

/// For deleters, which run in destructors: a warning, never an exception.
inline void warn(const std::string& text) noexcept {
  try {
    TORCH_WARN(text);
  } catch (...) {
    // Warnings may be set to be errors; a destructor cannot throw them.
    std::fprintf(stderr, "glake: %s\n", text.c_str());
  }
}

} // namespace glake
