// The door of the compiled backend: puts the pools of libgmlake in the place of torch's CUDA allocator.
//
// compiled.py builds this against the headers of the torch that is installed, when glake.enable() is first called.
#include "native/allocator.h"

/// Makes the pool torch's CUDA allocator. Null on success, else the reason, valid until the next call.
extern "C" __attribute__((visibility("default"))) const char* glake_torch_install() {
  static std::string reason;
  try {
    auto* present = glake::caching::allocator.load();
    if (present != nullptr && present->initialized()) {
      reason = "torch's CUDA allocator (" + present->name() +
          ") is in use already. Call glake.enable() before anything starts CUDA in this process.";
      return reason.c_str();
    }
    auto& ours = glake::Allocator::instance();
    glake::caching::allocator.store(&ours);
    c10::SetAllocator(c10::DeviceType::CUDA, &ours);
    return nullptr;
  } catch (const std::exception& error) {
    reason = error.what();
    return reason.c_str();
  }
}
