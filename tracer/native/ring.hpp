// The newest calls of a rank in a file that is mapped into memory: what tracer/issued.py writes, in C++.
#pragma once

#include <charconv>
#include <cstring>
#include <map>
#include <string_view>

#include "state.hpp"

namespace foretrace {

// Lines that are kept prepared at most: one for each block, kind, group and type.
constexpr size_t MOST_LINES = 4096;

// A line that is put together. Without printf, which takes 10 us where caches are cold.
class Text {
 public:
  void add(std::string_view words) {
    if (at_ == nullptr) return;
    if (size_t(end() - at_) < words.size()) {  // too long: stays so
      at_ = nullptr;
      return;
    }
    memcpy(at_, words.data(), words.size());
    at_ += words.size();
  }
  void add(std::string_view words, int64_t number) {
    add(words);
    if (at_ == nullptr) return;
    const auto [next, error] = std::to_chars(at_, end(), number);
    at_ = error == std::errc() ? next : nullptr;
  }

  const char* begin() const { return text_; }
  size_t length() const { return at_ == nullptr ? 0 : size_t(at_ - text_); }

 private:
  char* end() { return text_ + sizeof text_; }

  char text_[1024];
  char* at_ = text_;
};

// What a line says beside its numbers.
struct Wording {
  int32_t kind, group, dtype, block;
  bool operator==(const Wording&) const = default;
};
struct WordingHash {
  size_t operator()(const Wording& one) const {
    const uint64_t all = (uint64_t(uint32_t(one.block)) << 32 | uint32_t(one.group)) * 0x9E3779B97F4A7C15u;
    return size_t((all >> 7) ^ (uint64_t(uint32_t(one.kind)) << 8 | uint32_t(one.dtype)));
  }
};

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
    const uint64_t number = next();
    Text text;
    text.add(words, int64_t(number));
    text.add(", \"issued_ns\": ", call.start_ns + shift_ns_);
    text.add(", \"sequence\": ", call.sequence);
    text.add(", \"peer\": ", call.peer);
    text.add(", \"size_bytes\": ", call.size_bytes);
    text.add(", \"step\": ", call.at.step);
    text.add(", \"microbatch\": ", call.at.microbatch);
    text.add(", \"stage\": ", call.at.stage);
    text.add("}");
    const size_t length = text.length();
    if (length == 0 || length >= slot_bytes_) return;
    char* at = memory_ + number % n_slots_ * slot_bytes_;
    memcpy(at, text.begin(), length);
    memset(at + length, ' ', slot_bytes_ - 1 - length);
    at[slot_bytes_ - 1] = '\n';
  }

  // The number of the next call of this rank, of whatever kind.
  uint64_t next() { return n_.fetch_add(1); }

  void forget_lines() { lines_.clear(); }

  // What a line says of each kind, type and block, as JSON, by their numbers.
  std::vector<std::string> kinds, dtypes, blocks;

 private:
  const std::string& line(const Owner& owner, const Call& call) {
    const Wording key{call.kind, call.group, call.dtype, call.block};
    auto found = lines_.find(key);
    if (found == lines_.end()) {
      if (lines_.size() >= MOST_LINES) lines_.clear();
      const auto& group = owner.known_group(call.group);
      std::string words = "{\"kind\": " + kinds[size_t(call.kind)] + ", " + blocks[size_t(call.block)] +
                          ", \"axis\": " + group.axis + ", \"dtype\": " + dtypes[size_t(call.dtype)] +
                          ", \"group\": " + std::to_string(group.id) + ", \"n\": ";
      found = lines_.emplace(key, std::move(words)).first;
    }
    return found->second;
  }

  char* memory_ = nullptr;
  size_t n_slots_ = 0, slot_bytes_ = 0;
  int64_t shift_ns_ = 0;
  std::atomic<uint64_t> n_{0};
  std::unordered_map<Wording, std::string, WordingHash> lines_;
};

}  // namespace foretrace
