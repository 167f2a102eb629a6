// The declared ABI has every member at its slot; nothing to run.
#include "ort/api_tables.h"

#include <cstddef>

namespace ort {

#define SLOT(type, member, slot)                                                                                       \
    static_assert(offsetof(type, member) == (slot) * 8, #type "::" #member " is not at its slot");
#include "ort/slots.inc"
#undef SLOT

static_assert(sizeof(OrtNodeFusionOptions) == 8 && offsetof(OrtNodeFusionOptions, drop_constant_initializers) == 4);

} // namespace ort
