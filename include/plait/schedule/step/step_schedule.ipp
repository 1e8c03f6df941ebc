// The definitions of step_schedule.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string describe(const step_entry& e) {
  switch (e.op) {
    case step_op::pass:
      return cat({describe(e.pass), " of unit ", e.unit});
    case step_op::send:
      return "send " + describe(e.message);
    case step_op::receive:
      return "receive " + describe(e.message);
    case step_op::gather:
      return cat({"gather of unit ", e.unit});
    case step_op::release:
      return cat({"release of unit ", e.unit});
    case step_op::reduce:
      return cat({"reduction of unit ", e.unit});
    case step_op::update:
      return cat({"update of unit ", e.unit});
    default:
      return "the norm";
  }
}

}  // namespace plait
