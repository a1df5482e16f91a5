// Which allocations torch has routed to which private pool, and which pools may help out when memory is out.
//
// libgmlake does the routing of its own memory; this remembers it, to say which pool a block came from, to hand filters over with their
// owners, and to find the allocations that are for a pool with an allocator of its own.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "foreign.h"
#include "status.h"
#include "torch.h"

namespace glake {

class Routes {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  explicit Routes(ForeignPools& foreign) : foreign_(foreign) {}

  /// From now on what `filter` accepts comes from the pool.
  void begin(DeviceIndex device, MempoolId_t pool, Filter filter) {
    auto shared = std::make_shared<Filter>(std::move(filter));
    // The library drops its share, where this fails too.
    check(glake_pool_begin(device, pool.first, pool.second, &accepts, new Shared(shared), &drop));
    Route route{device, pool, shared, foreign_.has(device, pool), true, 0};
    try {
      // torch captures on the current stream, if it captures.
      check(glake_pool_expect_capture(device, pool.first, pool.second, c10::cuda::getCurrentCUDAStream(device).stream()));
      // One whose capture failed was never ended: the library has forgotten it now.
      finish(remove(device, pool));
      if (route.foreign) {
        foreign_.begin(device, pool, *shared);
      } else {
        route.mark = foreign_.capture_may_begin(device);
      }
    } catch (...) {
      (void)glake_pool_end(device, pool.first, pool.second);
      (void)glake_pool_release(device, pool.first, pool.second);
      throw;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back(std::move(route));
  }

  void end(DeviceIndex device, MempoolId_t pool) {
    const auto ended = remove(device, pool);
    if (!ended || ended->held) {
      check(glake_pool_end(device, pool.first, pool.second));
    }
    finish(ended);
  }

  /// The library takes no part in allocations of a pool with an allocator of its own. When one of them shows that no graph is being
  /// captured there, the library is told not to hold its completion points back any longer.
  void served_elsewhere(DeviceIndex device, MempoolId_t pool, cudaStream_t stream) {
    if (!is_held(device, pool)) {
      return;
    }
    cudaStreamCaptureStatus status{};
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
      // The legacy stream, while another thread captures a stream that synchronises with it: there is a capture.
      (void)cudaGetLastError();
      return;
    }
    if (status != cudaStreamCaptureStatusNone) {
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto route = find(device, pool);
      if (route == open_.end() || !std::exchange(route->held, false)) {
        return; // Another thread was first.
      }
    }
    check(glake_pool_end(device, pool.first, pool.second));
  }

  /// The pool that an allocation of this thread on `stream` comes from.
  MempoolId_t pool_of(DeviceIndex device, cudaStream_t stream) const {
    std::vector<Route> open;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open = open_;
    }
    // Filters ask CUDA about the stream: not under a lock. The latest route goes first, as in the library.
    for (auto route = open.rbegin(); route != open.rend(); ++route) {
      if (route->device == device && (*route->filter)(stream)) {
        return route->pool;
      }
    }
    return kNoPool;
  }

  void help(DeviceIndex device, MempoolId_t pool, bool willing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<DeviceIndex, MempoolId_t> helper{device, pool};
    helpers_.erase(std::remove(helpers_.begin(), helpers_.end(), helper), helpers_.end());
    if (willing) {
      helpers_.push_back(helper);
    }
  }

  /// A block from a pool that is marked for this, or null. A request that was for a private pool is not sent to another one.
  void* helped(DeviceIndex device, size_t bytes, cudaStream_t stream) {
    std::vector<std::pair<DeviceIndex, MempoolId_t>> helpers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      helpers = helpers_;
    }
    if (helpers.empty() || pool_of(device, stream) != kNoPool) {
      return nullptr;
    }
    for (const auto& [owner, pool] : helpers) {
      if (owner != device) {
        continue;
      }
      if (foreign_.has(device, pool)) {
        if (void* block = helped_by_foreign(device, pool, bytes, stream)) {
          return block;
        }
        continue;
      }
      std::thread::id asking = std::this_thread::get_id();
      if (glake_pool_begin(device, pool.first, pool.second, &same_thread, &asking, &keep) != GLAKE_OK) {
        continue; // Its memory is being handed out already, or it is gone.
      }
      void* block = nullptr;
      const int32_t status = glake_alloc(device, bytes, stream, &block);
      check(glake_pool_end(device, pool.first, pool.second));
      check(glake_pool_release(device, pool.first, pool.second));
      if (status == GLAKE_OK) {
        return block;
      }
    }
    return nullptr;
  }

 private:
  using Shared = std::shared_ptr<Filter>;

  struct Route {
    DeviceIndex device;
    MempoolId_t pool;
    Shared filter;
    /// The pool has an allocator of its own.
    bool foreign;
    /// The library has the route too.
    bool held;
    /// What `ForeignPools::capture_may_begin` answered.
    uint64_t mark;
  };

  /// Call it under the lock.
  std::vector<Route>::iterator find(DeviceIndex device, const MempoolId_t& pool) {
    return std::find_if(open_.begin(), open_.end(), [&](const Route& open) { return open.device == device && open.pool == pool; });
  }

  bool is_held(DeviceIndex device, const MempoolId_t& pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto route = find(device, pool);
    return route != open_.end() && route->held;
  }

  std::optional<Route> remove(DeviceIndex device, const MempoolId_t& pool) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto route = find(device, pool);
    if (route == open_.end()) {
      return std::nullopt;
    }
    std::optional<Route> removed = std::move(*route);
    open_.erase(route);
    return removed;
  }

  /// Tells torch's native allocator that a route has ended, if there was one.
  void finish(const std::optional<Route>& route) {
    if (route && route->foreign) {
      foreign_.end(route->device, route->pool);
    } else if (route) {
      foreign_.capture_ended(route->device, route->mark);
    }
  }

  static bool accepts(void* context, void* stream) noexcept {
    try {
      return (**static_cast<Shared*>(context))(static_cast<cudaStream_t>(stream));
    } catch (const std::exception& error) {
      warn(std::string("the filter of a private pool failed: ") + error.what());
      return false;
    }
  }

  static void drop(void* context) noexcept {
    delete static_cast<Shared*>(context);
  }

  static bool same_thread(void* context, void*) noexcept {
    return *static_cast<std::thread::id*>(context) == std::this_thread::get_id();
  }

  static void keep(void*) noexcept {}

  /// A block of a pool with an allocator of its own, or null.
  void* helped_by_foreign(DeviceIndex device, const MempoolId_t& pool, size_t bytes, cudaStream_t stream) {
    auto* native = foreign_.native();
    const auto asking = std::this_thread::get_id();
    try {
      native->beginAllocateToPool(device, pool, [asking](cudaStream_t) { return asking == std::this_thread::get_id(); });
    } catch (const std::exception&) {
      return nullptr; // Its memory is being handed out already, or it is gone.
    }
    void* block = nullptr;
    try {
      block = foreign_.allocate(device, pool, bytes, stream);
    } catch (const std::exception&) {
      // It cannot help either: the caller tells that memory is out.
    }
    native->endAllocateToPool(device, pool);
    native->releasePool(device, pool);
    return block;
  }

  ForeignPools& foreign_;
  mutable std::mutex mutex_;
  std::vector<Route> open_;
  std::vector<std::pair<DeviceIndex, MempoolId_t>> helpers_;
};

} // namespace glake
