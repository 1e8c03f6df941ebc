#pragma once

#include <cstring>
#include <utility>

#include "plait/comm/communicator.hpp"
#include "plait/comm/reduce.hpp"
#include "post_office.hpp"

namespace plait::test {

/// A communicator of one's own, as small as it gets: all operations are letters from rank to rank, reduced in the order
/// of the ranks. unit/comm/mailbox.cpp counts its lines.
class mailbox : public verbs<mailbox> {
 public:
  mailbox() = default;
  mailbox(std::shared_ptr<post_office> office, std::string id, std::string label, int rank, int size)
      : office_(std::move(office)), id_(std::move(id)), label_(std::move(label)), rank_(rank), size_(size) {}
  explicit operator bool() const { return office_ != nullptr; }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }

  request start(const call& c) {
    if (!office_) fail("a communicator without a group was used (its rank has a negative color in the split)");
    check(c, rank_, size_);
    const std::size_t size = size_of(c.type), bytes = c.count * size;
    const auto* const in = static_cast<const std::byte*>(c.in);
    auto* const out = static_cast<std::byte*>(c.out);
    if (c.kind == collective::receive)
      return request(later, std::make_shared<awaited_letter>(awaited_letter{office_, box(c.peer, rank_, c.tag), out}),
                     nullptr);
    if (c.kind == collective::send) return office_->put(box(rank_, c.peer, c.tag), in, bytes), request();

    const bool in_pieces = c.kind == collective::reduce_scatter || c.kind == collective::all_to_all;
    const auto sends = [&](int rank) { return c.kind != collective::broadcast || rank == c.peer; };
    std::vector<post_office::letter> got(static_cast<std::size_t>(size_));
    for (std::size_t k = 0; sends(rank_) && k < got.size(); ++k)
      office_->put(box(rank_, static_cast<int>(k)),
                   in + (c.ragged    ? c.send_offsets[k] * size
                         : in_pieces ? k * bytes
                                     : 0),
                   c.ragged ? c.send_counts[k] * size : bytes);
    for (int k = 0; k < size_; ++k)
      if (sends(k)) got[static_cast<std::size_t>(k)] = office_->take(box(k, rank_));
    if (c.kind == collective::all_reduce || c.kind == collective::reduce_scatter) {
      plait::detail::with_reduction(c.op, c.type, [&]<reduce_op Op, class T>() {
        plait::detail::reduce_range<Op, T>(
            size_, [&](int k) { return got[static_cast<std::size_t>(k)].data(); }, 0, c.count,
            [&](std::size_t at, const T* block, std::size_t n) { std::memcpy(out + at * size, block, n * size); });
      });
      return {};
    }
    for (std::size_t k = 0; k < got.size(); ++k)
      if (!got[k].empty())
        std::memcpy(out + (c.ragged                          ? c.receive_offsets[k] * size
                           : c.kind == collective::broadcast ? 0
                                                             : k * bytes),
                    got[k].data(), got[k].size());
    return {};
  }

  mailbox split(int color, int key, std::string_view label = {}) {
    std::vector<std::pair<int, int>> all(static_cast<std::size_t>(size_));
    const std::pair<int, int> mine(color, key);
    all_gather(&mine, all.data(), 2, dtype::i32);
    const std::string id = cat({id_, ".", office_->next(cat({id_, "/", rank_})), ".", color});
    int rank = 0, size = 0;
    for (int k = 0; k < size_; ++k) {
      const auto [its_color, its_key] = all[static_cast<std::size_t>(k)];
      size += its_color == color;
      rank += its_color == color && std::pair(its_key, k) < std::pair(key, rank_);
    }
    return color < 0 ? mailbox() : mailbox(office_, id, label.empty() ? id : std::string(label), rank, size);
  }
  void abort(const std::string& why) noexcept { office_->close(why); }

 private:
  static constexpr request_ops later = {[](void* p, void*) { static_cast<awaited_letter*>(p)->take(); },
                                        [](void* p, void*) { return static_cast<awaited_letter*>(p)->here(); },
                                        [](void* p, void*) noexcept { static_cast<awaited_letter*>(p)->drop(); }};
  std::string box(int from, int to, int tag = -1) const { return cat({id_, "/", from, "/", to, "/", tag}); }

  std::shared_ptr<post_office> office_;
  std::string id_, label_;
  int rank_ = 0, size_ = 0;
};

}  // namespace plait::test
