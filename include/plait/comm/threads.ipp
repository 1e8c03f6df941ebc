// The definitions of threads.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::threads::detail {

PLAIT_INLINE void run_ranks(int ranks, const std::function<void(communicator&)>& body) {
  if (ranks < 1) fail({"threads::run: ranks is ", ranks, "; at least 1 is needed"});
  const auto shared = std::make_shared<world>(ranks);
  const auto home = std::make_shared<group>();
  home->label = "world";
  for (int r = 0; r < ranks; ++r) home->members.push_back(r);

  const auto rank_main = [&](int rank) {
    std::exception_ptr exception;
    std::string what;
    try {
      communicator comm(std::make_shared<member>(shared, home, rank));
      body(comm);
    } catch (const std::exception& e) {
      exception = std::current_exception();
      what = e.what();
    } catch (...) {
      exception = std::current_exception();
      what = "an exception that is not a std::exception";
    }
    shared->leave(rank, exception, what);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  try {
    for (int r = 0; r < ranks; ++r) threads.emplace_back(rank_main, r);
  } catch (const std::exception& e) {
    shared->fail(cat({"threads::run: only ", threads.size(), " of ", ranks, " threads could be started: ", e.what()}));
  }
  for (std::thread& t : threads) t.join();

  if (!shared->failed()) return;
  if (const std::exception_ptr inner = shared->exception()) {
    try {
      std::rethrow_exception(inner);
    } catch (...) {
      std::throw_with_nested(error(shared->cause()));
    }
  }
  throw error(shared->cause());
}

}  // namespace plait::threads::detail

#include "plait/core/macros_on.hpp"
