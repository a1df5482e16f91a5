// What happens when memory is out: those who can give some up are asked, pools that may help do, and else everyone is told.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "history.h"
#include "routes.h"
#include "statistics.h"
#include "status.h"
#include "torch.h"

namespace glake {

class Exhaustion {
 public:
  Exhaustion(History& history, Routes& routes, const ForeignPools& foreign) : history_(history), routes_(routes), foreign_(foreign) {}

  void attach(caching::OutOfMemoryObserver observer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    observers_.push_back(std::move(observer));
  }

  /// A block after all, or the error. The library has tried everything of its own when this is called.
  C10_NOINLINE void* recover(int32_t status, DeviceIndex device, size_t bytes, cudaStream_t stream) {
    std::string text = last_error();
    void* block = nullptr;
    if (status == GLAKE_OUT_OF_MEMORY && (give_up_memory() | foreign_gives_back(device))) {
      status = glake_alloc(device, bytes, stream, &block);
      if (status == GLAKE_OK) {
        return block;
      }
      text = last_error();
    }
    if (status == GLAKE_OUT_OF_MEMORY) {
      block = routes_.helped(device, bytes, stream);
      if (block != nullptr) {
        return block;
      }
      const Statistics now(device);
      const Cause cause = History::cause();
      history_.add(TraceEntry::OOM, device, memory(device).first, rounded(bytes), stream, cause.pool, cause.context);
      c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(rounded(bytes)), now.allocated(), now.reserved(), cuda(device));
      tell(device, rounded(bytes));
    }
    raise(status, text);
  }

  /// Gives the driver what is free of ours; false if nothing was.
  static bool give_back(DeviceIndex device) {
    uint64_t released = 0;
    check(glake_trim(device, 0, &released));
    return released != 0;
  }

  /// With no lock held: observers may want the interpreter's.
  void tell(DeviceIndex device, size_t bytes) {
    const auto [free, total] = memory(device);
    double fraction = 1.0;
    check(glake_fraction(device, &fraction));
    std::vector<caching::OutOfMemoryObserver> observers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      observers = observers_;
    }
    for (const auto& observer : observers) {
      observer(device, bytes, static_cast<size_t>(static_cast<double>(total) * fraction), free);
    }
  }

 private:
  /// Lets those who hold memory that they could do without free it.
  static bool give_up_memory() {
    bool freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    return freed;
  }

  /// What is left of pools that had an allocator of their own and have ended.
  bool foreign_gives_back(DeviceIndex device) {
    auto* native = foreign_.native();
    if (native == nullptr) {
      return false;
    }
    const size_t before = Statistics::reserved_by(native, device);
    native->emptyCache(kNoPool);
    return Statistics::reserved_by(native, device) < before;
  }

  /// The device's free and total memory.
  static std::pair<size_t, size_t> memory(DeviceIndex device) {
    const c10::cuda::CUDAGuard guard(device);
    size_t free = 0;
    size_t total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return {free, total};
  }

  History& history_;
  Routes& routes_;
  const ForeignPools& foreign_;
  std::mutex mutex_;
  std::vector<caching::OutOfMemoryObserver> observers_;
};

} // namespace glake
