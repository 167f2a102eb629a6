// What the emulator offers beyond CANN's ABI: fault injection, call counts and the ledger of live objects.
//
// Environment, read by aclInit:
//   ASCEND_EMULATOR_PRODUCT   a2 (default), a3 or 950
//   ASCEND_EMULATOR_RELAX     which bounds are not checked, separated by commas:
//                             hidden    the hidden size He of both MLA operators, BlockNum of MlaPreprocess
//                             head_dim  D and Dr of both MLA operators and of SparseFlashAttention, D of ring attention
//                             rank      Hcq and Hckv of both MLA operators
//   ASCEND_EMULATOR_DEVICES   number of devices, 1 by default
//   ASCEND_EMULATOR_DELAY_US  microseconds that a stream waits before each task, 0 by default
//   ASCEND_EMULATOR_NOOP      1: kernels compute and write nothing
// Environment, read at the first use:
//   ASCEND_EMULATOR_MEMORY    bytes of device memory, 64 GiB by default (pages exist once they are written)
//   ASCEND_EMULATOR_THREADS   threads that share the work of a kernel, the number of processors by default
//   ASCEND_EMULATOR_FAIL      faults, FUNCTION:NTH:CODE separated by commas
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Makes the `nth` call of `function` from now on (1 is the next one) return `code`, null where it returns a pointer.
// A failed call does nothing, except that one which releases something releases it. `function` is the name of a
// function of the ABI, or "kernel": then the `nth` kernel of any operator fails on the device, which is noticed when
// its stream is synchronised.
void ascend_emulator_fail(const char* function, std::uint64_t nth, std::int32_t code);

// Forgets the faults that have not struck yet and sets all call counts to zero.
void ascend_emulator_reset_faults();

// How often `function` was called since the last reset.
std::uint64_t ascend_emulator_calls(const char* function);

// The names that ascend_emulator_fail takes, in alphabetical order; null behind the last one.
const char* ascend_emulator_function(std::uint64_t index);

// How many objects of a kind are alive: allocations, host_allocations, tensors, int_arrays, executors, streams or
// events; or how many bytes: device_bytes, the sum of the allocations.
std::int64_t ascend_emulator_live(const char* kind);

} // extern "C"
#pragma GCC visibility pop
