// The kernels of MemcpyFromHost and MemcpyToHost, the nodes that the runtime puts between host and device nodes.
//
// Without them the runtime takes the CPU provider's, moves the nodes to it, and hands claimed nodes host memory.
#pragma once

#include "ort/abi.h"

namespace ep {

// The registry with both kernels; made once and kept, because it must outlive all sessions.
const ort::OrtKernelRegistry* memcpy_kernels();

} // namespace ep
