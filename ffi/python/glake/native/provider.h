// The allocator that a program gives a private pool of torch's, and the segments that come from it.
//
// Invariant: a segment that its owner has unmapped (a serving engine whose worker sleeps) is not freed again, and is known as gone.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "torch.h"

namespace glake {

class Provider {
 public:
#if GLAKE_TORCH >= 211
  using Inner = std::shared_ptr<caching::CUDAAllocator>;
#else
  using Inner = caching::CUDAAllocator*;
#endif

  explicit Provider(Inner inner) : inner_(std::move(inner)) {}

  void* provide(size_t bytes) {
    void* segment = inner_->raw_alloc(bytes);
    if (segment != nullptr && is_known(segment)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      known_.insert(segment);
    }
    return segment;
  }

  /// Gives a segment back, unless its owner has unmapped it: then that was its end.
  void take_back(void* segment) {
    const bool gone = is_gone(segment);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      known_.erase(segment);
    }
    if (!gone) {
      inner_->raw_delete(segment);
    }
  }

  bool is_gone(void* segment) const {
    {
      // Memory that CUDA never knew (a plain allocation of the host's) cannot be told from memory that is gone.
      const std::lock_guard<std::mutex> lock(mutex_);
      if (known_.count(segment) == 0) {
        return false;
      }
    }
    return !is_known(segment);
  }

 private:
  static bool is_known(const void* address) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    return attributes.type != cudaMemoryTypeUnregistered;
  }

  Inner inner_;
  mutable std::mutex mutex_;
  std::set<const void*> known_;
};

} // namespace glake
