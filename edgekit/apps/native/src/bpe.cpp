#include "bpe.h"

#include <algorithm>
#include <cstdio>
#include <queue>
#include <unordered_map>

#include "errors.h"
#include "utf8.h"

namespace edgekit {
namespace {

uint64_t pair_of(TokenId left, TokenId right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

bool truth_of(const Json& model, const char* name) {
  const Json* found = model.find(name);
  return found != nullptr && found->truth(name);
}

void refuse_option(const Json& model, const char* name) {
  const Json* found = model.find(name);
  if (found != nullptr && !(found->is_text() && found->text(name).empty())) {
    refuse("tokenizer.json: a model with " + std::string(name) + " is not supported");
  }
}

}  // namespace

Bpe::Bpe(const Json& model) {
  if (const std::string& kind = model.at("type").text("type"); kind != "BPE") {
    refuse("tokenizer.json: a model of type " + quote_short(kind) + " is not supported; BPE is");
  }
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) refuse_option(model, name);
  fuses_unknown_ = truth_of(model, "fuse_unk");
  ignores_merges_ = truth_of(model, "ignore_merges");
  read_vocabulary(model.at("vocab"));
  read_merges(model.at("merges"));
  if (const Json* unknown = model.find("unk_token")) {
    unknown_ = find(unknown->text("unk_token"));
    if (!unknown_)
      refuse("tokenizer.json: unk_token " + quote_short(unknown->text("unk_token")) + " is not in the vocabulary");
  }
  if (!truth_of(model, "byte_fallback")) return;
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", static_cast<unsigned>(byte));
    const auto found = find(name);
    if (!found) refuse("tokenizer.json: byte_fallback without the token " + std::string(name) + " is not supported");
    bytes_.push_back(*found);
  }
}

void Bpe::read_vocabulary(const Json& vocabulary) {
  const Json::Members& members = vocabulary.members("vocab");
  TokenId last = -1;
  for (const auto& [text, value] : members) {
    const int64_t id = value.whole("vocab");
    if (id < 0 || id >= kMostTokens)
      refuse("tokenizer.json: token " + quote_short(text) + " has the id " + std::to_string(id));
    last = std::max(last, static_cast<TokenId>(id));
    by_text_.push_back(static_cast<TokenId>(id));
  }
  std::vector<const std::string*> by_id(static_cast<size_t>(last + 1), nullptr);
  size_t total = 0;
  for (const auto& [text, value] : members) {
    const std::string*& place = by_id[static_cast<size_t>(value.whole("vocab"))];
    if (place != nullptr)
      refuse("tokenizer.json: tokens " + quote_short(*place) + " and " + quote_short(text) + " have the same id");
    place = &text;
    total += text.size();
  }
  texts_.reserve(total);
  for (const std::string* text : by_id) {
    starts_.push_back(static_cast<uint32_t>(texts_.size()));
    is_known_.push_back(text != nullptr);
    if (text != nullptr) texts_ += *text;
  }
  starts_.push_back(static_cast<uint32_t>(texts_.size()));
  std::sort(by_text_.begin(), by_text_.end(),
            [&](TokenId one, TokenId other) { return *text_of(one) < *text_of(other); });
}

void Bpe::read_merges(const Json& merges) {
  std::unordered_map<std::string_view, TokenId> ids;
  ids.reserve(by_text_.size());
  for (const TokenId id : by_text_) ids.emplace(*text_of(id), id);
  const auto id_of = [&](std::string_view text) {
    const auto found = ids.find(text);
    if (found == ids.end())
      refuse("tokenizer.json: a merge needs the token " + quote_short(text) + ", which is missing");
    return found->second;
  };
  const Json::List& listed = merges.list("merges");
  std::string merged;
  for (size_t rank = 0; rank < listed.size(); ++rank) {
    std::string_view left, right;
    if (listed[rank].is_list()) {  // files have a merge as two strings, or as one with a space between
      const Json::List& parts = listed[rank].list("merges");
      if (parts.size() != 2) refuse("tokenizer.json: merge " + std::to_string(rank) + " has not two parts");
      left = parts[0].text("merges"), right = parts[1].text("merges");
    } else {
      const std::string_view both = listed[rank].text("merges");
      const size_t space = both.find(' ');
      if (space == both.npos || both.find(' ', space + 1) != both.npos) {
        refuse("tokenizer.json: merge " + std::to_string(rank) + " has not two parts");
      }
      left = both.substr(0, space), right = both.substr(space + 1);
    }
    merged.assign(left).append(right);
    merges_.push_back({pair_of(id_of(left), id_of(right)), static_cast<uint32_t>(rank), id_of(merged)});
  }
  // Of a pair that is listed twice, the last counts.
  std::stable_sort(merges_.begin(), merges_.end(), [](const Merge& one, const Merge& other) {
    return one.pair != other.pair ? one.pair < other.pair : one.rank > other.rank;
  });
  const auto is_same = [](const Merge& one, const Merge& other) { return one.pair == other.pair; };
  merges_.erase(std::unique(merges_.begin(), merges_.end(), is_same), merges_.end());
}

std::optional<std::string_view> Bpe::text_of(TokenId token) const {
  const auto id = static_cast<size_t>(token);
  if (token < 0 || id >= is_known_.size() || !is_known_[id]) return std::nullopt;
  return std::string_view(texts_).substr(starts_[id], starts_[id + 1] - starts_[id]);
}

std::optional<TokenId> Bpe::find(std::string_view token) const {
  const auto found = std::lower_bound(by_text_.begin(), by_text_.end(), token,
                                      [&](TokenId id, std::string_view text) { return *text_of(id) < text; });
  if (found == by_text_.end() || *text_of(*found) != token) return std::nullopt;
  return *found;
}

const Bpe::Merge* Bpe::merge_of(TokenId left, TokenId right) const {
  const uint64_t pair = pair_of(left, right);
  const auto found = std::lower_bound(merges_.begin(), merges_.end(), pair,
                                      [](const Merge& merge, uint64_t value) { return merge.pair < value; });
  return found == merges_.end() || found->pair != pair ? nullptr : &*found;
}

// The symbols of one piece as a linked list, merged in the order of the ranks.
class Bpe::Word {
 public:
  explicit Word(const Bpe& bpe) : bpe_(bpe) {}

  void add(TokenId token) {
    const auto place = static_cast<int32_t>(symbols_.size());
    symbols_.push_back({token, place - 1, -1});
    if (place > 0) symbols_[static_cast<size_t>(place - 1)].next = place;
  }

  void merge() {
    for (size_t place = 0; place + 1 < symbols_.size(); ++place) propose(static_cast<int32_t>(place));
    while (!queue_.empty()) {
      const Candidate best = queue_.top();
      queue_.pop();
      Symbol& left = at(best.place);
      if (left.token < 0 || left.next < 0) continue;
      Symbol& right = at(left.next);
      const Merge* merge = bpe_.merge_of(left.token, right.token);
      if (merge == nullptr || merge->merged != best.merged) continue;  // a part was merged with another meanwhile
      left.token = merge->merged;
      left.next = right.next;
      right.token = -1;
      if (left.next >= 0) at(left.next).previous = best.place;
      if (left.previous >= 0) propose(left.previous);
      if (left.next >= 0) propose(best.place);
    }
  }

  void append_to(std::vector<TokenId>& out) const {
    for (const Symbol& each : symbols_) {
      if (each.token >= 0) out.push_back(each.token);
    }
  }

 private:
  struct Symbol {
    TokenId token;  // -1: merged into the one before
    int32_t previous, next;
  };
  struct Candidate {
    uint32_t rank;
    int32_t place;
    TokenId merged;
    // The queue gives the largest: the lowest rank, then the first place.
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : place > other.place;
    }
  };

  Symbol& at(int32_t place) { return symbols_[static_cast<size_t>(place)]; }

  void propose(int32_t place) {
    const Symbol& left = at(place);
    if (const Merge* merge = bpe_.merge_of(left.token, at(left.next).token)) {
      queue_.push({merge->rank, place, merge->merged});
    }
  }

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> queue_;
};

void Bpe::encode(std::string_view piece, std::vector<TokenId>& out) const {
  if (piece.empty()) return;
  if (ignores_merges_) {
    if (const auto whole = find(piece)) return out.push_back(*whole);
  }
  Word word(*this);
  bool was_unknown = false;
  for (size_t place = 0; place < piece.size();) {
    const size_t start = place;
    next_point(piece, place);
    const std::string_view letter = piece.substr(start, place - start);
    if (const auto token = find(letter)) {
      word.add(*token);
    } else if (!bytes_.empty()) {
      for (const char byte : letter) word.add(bytes_[static_cast<uint8_t>(byte)]);
    } else if (unknown_) {
      if (!(was_unknown && fuses_unknown_)) word.add(*unknown_);
      was_unknown = true;
      continue;
    }
    was_unknown = false;
  }
  word.merge();
  word.append_to(out);
}

}  // namespace edgekit
