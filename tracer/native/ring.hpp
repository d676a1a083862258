// The newest calls of a rank in a file that is mapped into memory: what tracer/issued.py writes, in C++.
#pragma once

#include <cstdio>
#include <cstring>
#include <map>
#include <tuple>

#include "state.hpp"

namespace foretrace {

// Lines that are kept prepared at most: one for each block, kind, group and type.
constexpr size_t MOST_LINES = 4096;

// The ring. Not for several threads at once: its owner has a lock.
template <typename Owner, typename Call>
class Ring {
 public:
  // Write to `memory` from now on, nullptr: nowhere.
  void open(char* memory, size_t n_slots, size_t slot_bytes, int64_t shift_ns) {
    memory_ = memory;
    n_slots_ = n_slots;
    slot_bytes_ = slot_bytes;
    shift_ns_ = shift_ns;
  }

  void note(const Owner& owner, const Call& call) {
    if (memory_ == nullptr) return;
    const std::string& words = line(owner, call);
    char text[1024];
    const uint64_t number = next();
    const int length = snprintf(
        text, sizeof text,
        "%s\"n\": %lld, \"issued_ns\": %lld, \"sequence\": %lld, \"peer\": %d, \"size_bytes\": %lld, "
        "\"step\": %d, \"microbatch\": %d, \"stage\": %d}",
        words.c_str(), (long long)number, (long long)(call.start_ns + shift_ns_), (long long)call.sequence,
        int(call.peer), (long long)call.size_bytes, call.at.step, call.at.microbatch, call.at.stage);
    if (length <= 0 || size_t(length) >= slot_bytes_) return;
    char* at = memory_ + number % n_slots_ * slot_bytes_;
    memcpy(at, text, size_t(length));
    memset(at + length, ' ', slot_bytes_ - 1 - size_t(length));
    at[slot_bytes_ - 1] = '\n';
  }

  // The number of the next call of this rank, of whatever kind.
  uint64_t next() { return n_.fetch_add(1); }

  void forget_lines() { lines_.clear(); }

  // What a line says of each kind, type and block, as JSON, by their numbers.
  std::vector<std::string> kinds, dtypes, blocks;

 private:
  const std::string& line(const Owner& owner, const Call& call) {
    const auto key = std::make_tuple(call.kind, call.group, call.dtype, call.block);
    auto found = lines_.find(key);
    if (found == lines_.end()) {
      if (lines_.size() >= MOST_LINES) lines_.clear();
      const auto& group = owner.known_group(call.group);
      std::string words = "{\"kind\": " + kinds[size_t(call.kind)] + ", " + blocks[size_t(call.block)] +
                          ", \"axis\": " + group.axis + ", \"dtype\": " + dtypes[size_t(call.dtype)] +
                          ", \"group\": " + std::to_string(group.id) + ", ";
      found = lines_.emplace(key, std::move(words)).first;
    }
    return found->second;
  }

  char* memory_ = nullptr;
  size_t n_slots_ = 0, slot_bytes_ = 0;
  int64_t shift_ns_ = 0;
  std::atomic<uint64_t> n_{0};
  std::map<std::tuple<int32_t, int32_t, int, int32_t>, std::string> lines_;
};

}  // namespace foretrace
