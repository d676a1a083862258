// Transfers of gloo to their ends, and what a pipeline has said of them before they were issued.
//
// A transfer of gloo is complete only when somebody has waited for it, and each wait counts. So the training
// gets a work of ours around that of gloo, by which we see who waits for it, in Python or in C++. For one
// that nobody waits for a thread of ours does, as those of tracer/watchers.py, and whoever comes later waits
// for our thread instead.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <thread>

#include "calls.hpp"

namespace foretrace {

// Age from which on a transfer that nobody waits for gets a thread: what is waited for at once should not
// pay.
constexpr int64_t LOOSE_NS = 200'000;

// Threads at most: who posts many transfers ahead and waits for them later should not get one for each.
constexpr size_t MOST_WATCHERS = 64;

// Transfers that a pipeline has announced and not issued; more are those of actions that never came to that.
constexpr size_t MOST_ANNOUNCED = 4096;

// A transfer of gloo as the training has it.
class Followed final : public c10d::Work {
 public:
  Followed(c10::intrusive_ptr<c10d::Work> inner, CallPtr call)
      : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), call_(std::move(call)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  void blockCurrentStream() { block(*inner_); }  // torch 2.11 brought it

 private:
  friend class Transfers;

  template <typename AnyWork>
  static void block(AnyWork& work) {
    if constexpr (requires { work.blockCurrentStream(); }) work.blockCurrentStream();
  }

  // Wait for the thread of ours that waits, as for the work itself.
  bool join(std::chrono::milliseconds timeout);

  // Wait in place of the training; on a thread of ours.
  void follow();

  // Note that it is over.
  void end() const {
    if (call_->peer < 0) calls().received(call_, inner_->sourceRank());
    calls().end(call_);
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const CallPtr call_;

  // All of these under the lock of the transfers.
  bool is_watched_ = false, is_claimed_ = false, is_done_ = false, result_ = false;
  std::exception_ptr error_;
  std::condition_variable done_;
};
using FollowedPtr = c10::intrusive_ptr<Followed>;

// What a pipeline says of a transfer before it is issued.
struct Announced {
  Position at;
  int32_t content;  // number of the block
};

// The transfers of a process that nobody waits for yet, and the threads that do. For any thread.
class Transfers {
 public:
  // Have an eye on a transfer that was just issued.
  void add(const FollowedPtr& one) {
    one->call_->is_told = false;
    std::lock_guard<std::mutex> guard(lock_);
    loose_.push_back(one);
    n_loose_ = int(loose_.size());
  }

  // Give those a thread that have been loose for long.
  void sweep() {
    if (n_loose_ == 0 && !has_spent_) return;
    std::vector<FollowedPtr> spent;  // freed after the lock
    const int64_t now = now_ns();
    size_t n_woken = 0;
    std::unique_lock<std::mutex> guard(lock_);
    spent.swap(spent_);
    has_spent_ = false;
    while (!loose_.empty() && now - loose_.front()->call_->start_ns > LOOSE_NS && has_thread()) {
      Followed& one = *loose_.front();
      one.is_watched_ = one.call_->is_told = true;
      queue_.push_back(std::move(loose_.front()));
      loose_.pop_front();
      ++n_woken;
    }
    n_loose_ = int(loose_.size());
    std::condition_variable* const wake = wake_;
    guard.unlock();  // else who is woken would wait for the lock next, and be woken again
    for (; n_woken > 0; --n_woken) wake->notify_one();
  }

  // The training waits for a transfer; whether it must do so itself, as no thread of ours does.
  bool claim(Followed& one) {
    std::lock_guard<std::mutex> guard(lock_);
    if (one.is_watched_) return false;
    if (!one.is_claimed_) {
      one.is_claimed_ = true;
      const auto is_it = [&](const FollowedPtr& loose) { return loose.get() == &one; };
      const auto found = std::find_if(loose_.rbegin(), loose_.rend(), is_it);  // mostly the last
      if (found != loose_.rend()) loose_.erase(std::next(found).base());
      n_loose_ = int(loose_.size());
    }
    return true;
  }

  // Watch no more: what nobody waits for is left to the training.
  void close() {
    std::deque<FollowedPtr> loose;
    std::vector<FollowedPtr> spent;
    std::lock_guard<std::mutex> guard(lock_);
    loose.swap(loose_);
    spent.swap(spent_);
    n_loose_ = 0;
    has_spent_ = false;
    announced_.clear();
    n_announced_ = 0;
    ++n_closed_;
    wake_->notify_all();
  }

  // A pipeline is about to issue a transfer of what is at `data`.
  void announce(bool is_send, const void* data, const Announced& what) {
    std::lock_guard<std::mutex> guard(lock_);
    if (announced_.size() > MOST_ANNOUNCED) announced_.clear();
    announced_[{data, is_send}] = what;
    n_announced_ = int(announced_.size());
  }

  // Take what was said of a transfer; whether anything was.
  bool take_announced(bool is_send, const void* data, Announced* what) {
    if (n_announced_ == 0) return false;
    std::lock_guard<std::mutex> guard(lock_);
    const auto found = announced_.find({data, is_send});
    if (found == announced_.end()) return false;
    *what = found->second;
    announced_.erase(found);
    n_announced_ = int(announced_.size());
    return true;
  }

  // As those of Lane; a child has none of the threads.
  void hold() { lock_.lock(); }
  void release() { lock_.unlock(); }
  void forget_threads() {
    wake_ = new std::condition_variable;  // somebody may have waited at the one before, which is left alone
    n_threads_ = n_idle_ = 0;
  }

 private:
  friend class Followed;

  // Whether a thread has nothing to do, or could be made. Needs the lock.
  bool has_thread() {
    if (n_idle_ > queue_.size()) return true;
    if (n_threads_ >= MOST_WATCHERS) return false;
    try {
      std::thread([this, n_closed = n_closed_] { run(n_closed); }).detach();
    } catch (const std::system_error&) {  // the system has no room for it
      return false;
    }
    ++n_threads_;
    ++n_idle_;
    return true;
  }

  // What a thread does until the transfers are closed that were open when it was made.
  void run(int64_t n_closed) {
    pthread_setname_np(pthread_self(), "foretrace-watch");
    std::unique_lock<std::mutex> guard(lock_);
    while (true) {
      wake_->wait(guard, [&] { return !queue_.empty() || n_closed != n_closed_; });
      --n_idle_;
      if (queue_.empty()) break;
      FollowedPtr one = std::move(queue_.front());
      queue_.pop_front();
      guard.unlock();
      one->follow();
      guard.lock();
      // Whoever frees a tensor may need the interpreter's lock, which ends threads while Python ends.
      spent_.push_back(std::move(one));
      has_spent_ = true;
      ++n_idle_;
    }
    --n_threads_;
  }

  std::mutex lock_;
  std::condition_variable* wake_ = new std::condition_variable;
  std::deque<FollowedPtr> loose_, queue_;  // in the order of issue
  std::vector<FollowedPtr> spent_;
  std::atomic<int> n_loose_{0}, n_announced_{0};
  std::atomic<bool> has_spent_{false};
  std::map<std::pair<const void*, bool>, Announced> announced_;
  size_t n_threads_ = 0, n_idle_ = 0;
  int64_t n_closed_ = 0;
};

inline Transfers& transfers() {
  static Transfers* found = new Transfers;  // as the state
  return *found;
}

inline bool Followed::wait(std::chrono::milliseconds timeout) {
  if (!transfers().claim(*this)) return join(timeout);
  struct Ending {
    const Followed& one;
    ~Ending() { one.end(); }
  } ending{*this};
  return inner_->wait(timeout);
}

inline bool Followed::join(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> guard(transfers().lock_);
  const auto is_done = [&] { return is_done_; };
  if (timeout <= kNoTimeout) {
    done_.wait(guard, is_done);
  } else if (!done_.wait_for(guard, timeout, is_done)) {
    const std::string waited = std::to_string(timeout.count());
    throw std::runtime_error("timed out after " + waited + " ms waiting for a point-to-point transfer");
  }
  if (error_) std::rethrow_exception(error_);
  return result_;
}

inline void Followed::follow() {
  bool result = false;
  std::exception_ptr error;
  try {
    result = inner_->wait();
  } catch (...) {  // handed on to whoever waits in the training
    error = std::current_exception();
  }
  end();
  std::lock_guard<std::mutex> guard(transfers().lock_);
  result_ = result;
  error_ = std::move(error);
  is_done_ = true;
  done_.notify_all();
}

// Whether a work is a transfer of gloo, which may be waited for once.
inline bool is_gloo_transfer(const c10d::Work& work) {
  const char* const name = typeid(work).name();  // nested classes of a class that has no header of its own
  return strcmp(name, "N4c10d16ProcessGroupGloo8SendWorkE") == 0 ||
         strcmp(name, "N4c10d16ProcessGroupGloo8RecvWorkE") == 0;
}

}  // namespace foretrace
