// The compute stream of a process, flattened: at any moment at most one block owns the time.
//
// What tracer/lane.py does, in C++: the two cut the same segments.
#pragma once

#include <pthread.h>
#include <time.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace foretrace {

// Segments, or calls, that wait to be written at most: some 100 MB as rows of Python.
constexpr size_t MOST_RECORDS = 500'000;

// Number of the owner of time that is no compute, although a block is running.
constexpr int32_t NOBODY = 0;

inline int64_t now_ns() {  // as time.monotonic_ns
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Where in the training the process is; -1 is unknown.
struct Position {
  int step = -1, stage = -1, virtual_stage = -1, microbatch = -1;
};

// Kind of work and block, by their numbers.
struct Owner {
  int32_t kind, block;
  bool operator==(const Owner& other) const { return kind == other.kind && block == other.block; }
};

// A piece of compute time that one block owns.
struct Segment {
  Owner owner;
  int64_t start_ns, end_ns;
  Position at;
};

// A stack of what runs now; the top owns the time, and only while nothing waits. For any thread.
class Lane {
 public:
  // `at` is where the training is, `is_noted` whether segments are kept.
  Lane(const Position* at, const std::atomic<bool>* is_noted) : at_(at), is_noted_(is_noted) {}

  int push(Owner owner) {
    std::lock_guard<std::mutex> guard(lock_);
    if (stack_.empty() || !(stack_.back() == owner)) cut();
    stack_.push_back(owner);
    return int(stack_.size()) - 1;
  }

  void pop(size_t depth) {
    std::lock_guard<std::mutex> guard(lock_);
    if (depth >= stack_.size()) return;
    if (depth == 0 || !(stack_[depth - 1] == stack_.back())) cut();
    stack_.resize(depth, Owner{0, NOBODY});
  }

  void replace(Owner owner) {
    std::lock_guard<std::mutex> guard(lock_);
    if (stack_.empty() || stack_.back() == owner) return;
    cut();
    stack_.back() = owner;
  }

  // It is this thread that trains: what others do meanwhile, as to save a checkpoint, is beside it.
  void own() {
    thread_ = pthread_self();
    has_thread_ = true;
  }

  // Whether this thread trains, or runs nodes of a backward pass; all do until one has said that it trains.
  bool is_own() const {
    return !has_thread_ || pthread_equal(thread_, pthread_self()) != 0 ||
           torch::autograd::get_current_graph_task_id() != -1;
  }

  // Whether it is the training that waits from now on: then `resume` has to follow.
  bool pause() {
    if (!is_own()) return false;
    std::lock_guard<std::mutex> guard(lock_);
    cut();
    ++n_waits_;
    return true;
  }

  void resume() {
    std::lock_guard<std::mutex> guard(lock_);
    if (n_waits_ > 0) --n_waits_;  // 0: a recording has begun since
    since_ns_ = now_ns();
  }

  // The block that owns the time now.
  int32_t block() {
    std::lock_guard<std::mutex> guard(lock_);
    return stack_.empty() ? NOBODY : stack_.back().block;
  }

  size_t depth() {
    std::lock_guard<std::mutex> guard(lock_);
    return stack_.size();
  }

  // The segments that were cut since the last call; adds to n_lost how many came when too many waited.
  std::vector<Segment> take(int64_t* n_lost) {
    std::vector<Segment> taken;
    taken.reserve(256);  // outside of the lock: what replaces the one that is full
    std::lock_guard<std::mutex> guard(lock_);
    taken.swap(done_);
    *n_lost += n_lost_;
    n_lost_ = 0;
    return taken;
  }

  void reset() {
    std::lock_guard<std::mutex> guard(lock_);
    stack_.clear();
    done_.clear();
    n_waits_ = 0;
    n_lost_ = 0;
    has_thread_ = false;
  }

  // Around a fork, so that the child does not inherit a lock that nobody there gives back.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }

 private:
  void cut() {
    const int64_t now = now_ns();
    if (!stack_.empty() && n_waits_ == 0 && stack_.back().block != NOBODY && *is_noted_) {
      if (done_.size() < MOST_RECORDS) {
        done_.push_back({stack_.back(), since_ns_, now, *at_});
      } else {
        ++n_lost_;
      }
    }
    since_ns_ = now;
  }

  const Position* at_;
  const std::atomic<bool>* is_noted_;
  std::mutex lock_;
  std::vector<Owner> stack_;
  std::vector<Segment> done_;
  std::atomic<pthread_t> thread_{};
  std::atomic<bool> has_thread_{false};
  int n_waits_ = 0;
  int64_t since_ns_ = 0, n_lost_ = 0;
};

}  // namespace foretrace
