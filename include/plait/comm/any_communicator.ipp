// The definitions of any_communicator.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include "plait/core/compiled.hpp"

namespace plait {

PLAIT_INLINE void any_communicator::run(const call& c) {
  if (accounting_ == nullptr) return held().run(c);
  accounting::entry written(*accounting_, c);
  held().run(c);
  written.over(false);
}

PLAIT_INLINE request any_communicator::start(const call& c) {
  if (accounting_ == nullptr) return held().start(c);
  accounting::entry written(*accounting_, c);
  request r = held().start(c);
  const std::uint64_t token = written.over(true);
  r.observe(accounting_, token, written.ended());
  return r;
}

PLAIT_INLINE any_communicator any_communicator::split(int color, int key, std::string_view label) {
  any_communicator child = held().split(color, key, label);
  return accounting_ && child ? child.counted(accounting_->book(), accounting_->events()) : child;
}

PLAIT_INLINE any_communicator any_communicator::counted(std::shared_ptr<ledger> book, std::shared_ptr<recorder> events,
                                                        std::string_view name) const {
  any_communicator out = *this;
  if (held_)
    out.accounting_ = std::make_shared<accounting>(name.empty() ? label() : std::string(name), rank(), size(),
                                                   std::move(book), std::move(events), !enqueues());
  return out;
}

}  // namespace plait
