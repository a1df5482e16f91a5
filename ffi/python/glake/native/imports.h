// Blocks of other processes that are open here: each once a device, however many tensors came with it.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "status.h"
#include "torch.h"

namespace glake {

class Imports {
 public:
  /// A name of the block's memory that another process can open.
  static caching::ShareableHandle share(const void* ptr) {
    std::array<uint8_t, 4096> handle{};
    size_t length = 0;
    uint64_t offset = 0;
    check(glake_share(ptr, handle.data(), handle.size(), &length, &offset));
    return caching::ShareableHandle{
        static_cast<ptrdiff_t>(offset), std::string(reinterpret_cast<const char*>(handle.data()), length)};
  }

  /// Whether a name was made by `share`, in this process or another. torch's own begin with other bytes.
  static bool is_ours(const std::string& handle) {
    return handle.compare(0, 4, "GLSH") == 0;
  }

  /// Opens what another process shared; it is closed with its last owner.
  std::shared_ptr<void> open(const std::string& handle, DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{device, handle};
    if (const auto known = open_.find(key); known != open_.end()) {
      if (auto base = known->second.lock()) {
        return base;
      }
    }
    void* base = nullptr;
    check(glake_open_shared(reinterpret_cast<const uint8_t*>(handle.data()), handle.size(), device, &base));
    std::shared_ptr<void> owner(base, [this, key](void* opened) { close(key, opened); });
    open_[key] = owner;
    return owner;
  }

 private:
  using Key = std::pair<DeviceIndex, std::string>;

  void close(const Key& key, void* base) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    // It may have been opened anew between the last owner's end and this.
    if (const auto known = open_.find(key); known != open_.end() && known->second.expired()) {
      open_.erase(known);
    }
    if (glake_close_shared(base) != GLAKE_OK) {
      warn(last_error());
    }
  }

  std::mutex mutex_;
  std::map<Key, std::weak_ptr<void>> open_;
};

} // namespace glake
