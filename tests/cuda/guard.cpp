// Lets torch's CPU build index tensors that only claim to be on CUDA: it asks a device guard, and has none for CUDA.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
