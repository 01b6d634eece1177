// A CUDA device that does nothing: fake tensors, which hold no data, need a device guard and CUDA's hooks all the same.
// A PyTorch that was built for CPUs has neither; those of a build for CUDA ask for a driver. Loaded before torch is
// imported, and put in force after it (see guard.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct Guard : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};

}  // namespace

// A build for CUDA registers its own guard when torch is imported, and the last one is in force.
extern "C" void install_guard() { c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new Guard()); }

namespace at {

struct Hooks : public CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
};

// Preferred, since a build for CUDA registers hooks by this name too, before or after.
static const bool registered = [] {
  CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](CUDAHooksArgs arguments) -> std::unique_ptr<CUDAHooksInterface> { return std::make_unique<Hooks>(arguments); },
      c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace at
