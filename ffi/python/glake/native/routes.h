// Which allocations torch has routed to which private pool, and which pools may help out when memory is out.
//
// libgmlake does the routing; this remembers it, to say which pool a block came from and to hand filters over with their owners.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "status.h"
#include "torch.h"

namespace glake {

class Routes {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  /// From now on what `filter` accepts comes from the pool.
  void begin(DeviceIndex device, MempoolId_t pool, Filter filter) {
    auto shared = std::make_shared<Filter>(std::move(filter));
    // The library drops its share, where this fails too.
    check(glake_pool_begin(device, pool.first, pool.second, &accepts, new Shared(shared), &drop));
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back(Route{device, pool, std::move(shared)});
  }

  void end(DeviceIndex device, MempoolId_t pool) {
    check(glake_pool_end(device, pool.first, pool.second));
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto route = std::find_if(open_.begin(), open_.end(), [&](const Route& open) { return open.device == device && open.pool == pool; });
    if (route != open_.end()) {
      open_.erase(route);
    }
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
  };

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

  mutable std::mutex mutex_;
  std::vector<Route> open_;
  std::vector<std::pair<DeviceIndex, MempoolId_t>> helpers_;
};

} // namespace glake
