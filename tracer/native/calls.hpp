// Collectives and transfers from their issue until Python has taken them.
//
// What tracer/completion.py keeps, for tensors of the processor, without the interpreter's lock. The end of a
// collective is told by a callback on its future, on the thread of gloo that completes it. A reduce-scatter
// of gloo has no future, as it does its last copy inside of `wait`: it is over when somebody has waited. Ends
// of transfers are in transfers.hpp.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <deque>

#include "ring.hpp"
#include "state.hpp"

namespace foretrace {

// A collective, or one side of a transfer, from its issue to its end.
struct Call {
  int32_t kind, group, block;
  int dtype;
  bool is_transfer = false, is_send = false;
  std::atomic<int> peer{-1};  // global rank of the other side of a transfer; -1 while it may be anybody
  std::atomic<int64_t> sequence{-1};
  int64_t size_bytes = 0;
  Position at;
  int64_t start_ns;
  std::atomic<int64_t> end_ns{0};  // 0: under way
  std::atomic<bool> is_told{true};  // whether somebody will tell its end, without being asked by the training
  std::vector<const void*> outputs;
  c10::intrusive_ptr<c10d::Work> work;  // of what has no future, until it was waited for
};
using CallPtr = std::shared_ptr<Call>;

// Works that nobody has waited for are looked through when there are that many more of them.
constexpr size_t KEPT_WORKS = 64;

// What a process has issued, from their issue until Python has taken them. For any thread.
class Calls {
 public:
  // Count and note a call that is about to be made; false: too many wait to be taken.
  bool issue(const CallPtr& call) {
    std::lock_guard<std::mutex> guard(lock_);
    Group& group = groups_[call->group];
    if (!call->is_transfer) {
      call->sequence = group.n_calls++;
    } else if (call->peer >= 0) {
      call->sequence = group.n_transfers[{call->peer, call->is_send}]++;
    }
    call->start_ns = now_ns();
    ring_.note(*this, *call);
    if (fresh_.size() + told_.size() >= MOST_RECORDS) {
      ++n_lost_;
      return false;
    }
    fresh_.push_back(call);
    for (const void* output : call->outputs) by_output_[output] = call;
    return true;
  }

  // A receive from anybody has got the message of a member of its group; told before its end.
  void received(const CallPtr& call, int source) {
    std::lock_guard<std::mutex> guard(lock_);
    Group& group = groups_[call->group];
    if (source < 0 || size_t(source) >= group.ranks.size()) return;
    const int peer = group.ranks[size_t(source)];
    call->sequence = group.n_transfers[{peer, false}]++;
    call->peer = peer;
  }

  // Whoever needed the result of a call has it, or gloo does.
  void end(const CallPtr& call) {
    c10::intrusive_ptr<c10d::Work> work;  // freed after the lock: its tensors may need the interpreter's
    int64_t under_way = 0;
    call->end_ns.compare_exchange_strong(under_way, now_ns());
    std::lock_guard<std::mutex> guard(lock_);
    for (const void* output : call->outputs) {
      auto found = by_output_.find(output);
      if (found != by_output_.end() && found->second == call) by_output_.erase(found);
    }
    if (call->work) {
      by_work_.erase(call->work.get());
      n_waitable = int(by_work_.size());
      work = std::move(call->work);
    }
  }

  // A call without a future goes on until its work is waited for.
  void awaits(const CallPtr& call, c10::intrusive_ptr<c10d::Work> work) {
    std::vector<CallPtr> dropped;
    {
      std::lock_guard<std::mutex> guard(lock_);
      by_work_[work.get()] = call;
      n_waitable = int(by_work_.size());
      call->work = std::move(work);
      if (by_work_.size() > most_works_) {
        for (const auto& [_, one] : by_work_) {
          if (one->work.use_count() == 1) dropped.push_back(one);
        }
        most_works_ = by_work_.size() - dropped.size() + KEPT_WORKS;
      }
    }
    for (const CallPtr& one : dropped) end(one);  // nobody can wait any more, and tensors are kept for that
  }

  CallPtr of_output(const void* output) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_output_.find(output);
    return found == by_output_.end() ? nullptr : found->second;
  }

  CallPtr of_work(const c10d::Work* work) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_work_.find(work);
    return found == by_work_.end() ? nullptr : found->second;
  }

  // The number of a group, -1 if Python has not told of it.
  int32_t group(const std::string& name) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = by_name_.find(name);
    return found == by_name_.end() ? -1 : found->second;
  }

  // The global rank of a member of a group, by its rank in it.
  int member(int32_t group, int64_t rank) {
    std::lock_guard<std::mutex> guard(lock_);
    return groups_[group].ranks.at(size_t(rank));
  }

  // Learn or rename a group.
  int32_t add_group(const std::string& name, int64_t id, std::string axis, std::vector<int> ranks) {
    std::lock_guard<std::mutex> guard(lock_);
    auto [found, is_new] = by_name_.emplace(name, int32_t(groups_.size()));
    if (is_new) groups_.emplace_back();
    groups_[found->second].id = id;
    groups_[found->second].axis = std::move(axis);
    groups_[found->second].ranks = std::move(ranks);
    ring_.forget_lines();
    return found->second;
  }

  // What lines of the ring say of a kind, of a block and of all types, as JSON; where it is.
  void name_kind(int32_t number, std::string words) { name(ring_.kinds, number, std::move(words)); }
  void name_block(int32_t number, std::string words) { name(ring_.blocks, number, std::move(words)); }
  void name_types(std::vector<std::string> words) {
    std::lock_guard<std::mutex> guard(lock_);
    ring_.dtypes = std::move(words);
  }
  void open_ring(char* memory, size_t n_slots, size_t slot_bytes, int64_t shift_ns) {
    std::lock_guard<std::mutex> guard(lock_);
    ring_.open(memory, n_slots, slot_bytes, shift_ns);
  }
  size_t n_kinds() {
    std::lock_guard<std::mutex> guard(lock_);
    return ring_.kinds.size();
  }
  uint64_t next_number() { return ring_.next(); }

  struct Group {
    int64_t id = 0, n_calls = 0;
    std::map<std::pair<int, bool>, int64_t> n_transfers;  // by peer, and whether they go there
    std::vector<int> ranks;                               // global ones
    std::string axis;                                     // as JSON
  };
  const Group& known_group(int32_t number) const { return groups_[number]; }

  // What is known of a group by now.
  Group copy_of(int32_t number) {
    std::lock_guard<std::mutex> guard(lock_);
    return groups_.at(size_t(number));
  }

  // What was issued since the last time, and what of that before has ended since.
  void take(std::vector<CallPtr>* fresh, std::vector<CallPtr>* ended, int64_t* n_lost) {
    std::lock_guard<std::mutex> guard(lock_);
    size_t kept = 0;
    for (CallPtr& call : told_) {
      if (call->end_ns != 0) {
        ended->push_back(std::move(call));
      } else {
        told_[kept++] = std::move(call);
      }
    }
    told_.resize(kept);
    fresh->swap(fresh_);
    for (const CallPtr& call : *fresh) told_.push_back(call);
    *n_lost += n_lost_;
    n_lost_ = 0;
  }

  // Whether a call is under way whose end will be told.
  bool is_busy() {
    std::lock_guard<std::mutex> guard(lock_);
    auto busy = [](const CallPtr& call) { return call->end_ns == 0 && call->is_told; };
    return std::any_of(fresh_.begin(), fresh_.end(), busy) || std::any_of(told_.begin(), told_.end(), busy);
  }

  void reset() {
    decltype(by_work_) works;  // freed after the lock, as in `end`
    std::lock_guard<std::mutex> guard(lock_);
    fresh_.clear();
    told_.clear();
    by_output_.clear();
    works.swap(by_work_);
    by_name_.clear();
    groups_.clear();
    n_waitable = 0;
    n_lost_ = 0;
    ring_.forget_lines();
  }

  // As those of Lane.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }

  std::atomic<int> n_waitable{0};  // calls that are over when somebody has waited

 private:
  void name(std::vector<std::string>& names, int32_t number, std::string words) {
    std::lock_guard<std::mutex> guard(lock_);
    if (names.size() <= size_t(number)) names.resize(size_t(number) + 1, "\"\"");
    names[size_t(number)] = std::move(words);
  }

  std::mutex lock_;
  Ring<Calls, Call> ring_;
  std::vector<CallPtr> fresh_, told_;
  std::unordered_map<const void*, CallPtr> by_output_;
  std::unordered_map<const c10d::Work*, CallPtr> by_work_;
  std::unordered_map<std::string, int32_t> by_name_;
  std::deque<Group> groups_;
  size_t most_works_ = KEPT_WORKS;
  int64_t n_lost_ = 0;
};

inline Calls& calls() {
  static Calls* found = new Calls;  // as the state
  return *found;
}

// Note that a work was waited for; whether it is that of a call that is over by that.
inline bool waited(const c10d::Work* work) {
  const CallPtr call = calls().of_work(work);
  if (call) calls().end(call);
  return call != nullptr;
}

// The same for Python, by way of the dispatcher, which takes some 100 us.
inline bool waited_boxed(const c10::intrusive_ptr<c10d::Work>& work) { return waited(work.get()); }

}  // namespace foretrace
