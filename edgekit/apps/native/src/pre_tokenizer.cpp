#include "pre_tokenizer.h"

#include "byte_letters.h"
#include "errors.h"
#include "regex.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr int kDeepest = 8;
constexpr size_t kMostSteps = 16;
constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

enum class Behaviour { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext };

Behaviour behaviour_of(const Json& described) {
  const std::string& name = described.at("behavior").text("behavior");
  if (name == "Isolated") return Behaviour::kIsolated;
  if (name == "Removed") return Behaviour::kRemoved;
  if (name == "MergedWithPrevious") return Behaviour::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behaviour::kMergedWithNext;
  refuse("tokenizer.json: a split with the behavior " + quote_short(name) + " is not supported");
}

// Collects the matches of a pattern, and what is between them, as the behaviour says.
class Parts {
 public:
  Parts(Behaviour behaviour, std::vector<std::string>& out) : behaviour_(behaviour), out_(out) {}

  void add(std::string_view part, bool is_match) {
    if (part.empty()) return;
    if (is_match && behaviour_ == Behaviour::kRemoved) return;
    const bool joins = behaviour_ == Behaviour::kMergedWithPrevious ? is_match && !was_match_ && has_any_
                       : behaviour_ == Behaviour::kMergedWithNext   ? !is_match && was_match_
                                                                    : false;
    if (joins) out_.back().append(part);
    else out_.emplace_back(part);
    was_match_ = is_match, has_any_ = true;
  }

 private:
  const Behaviour behaviour_;
  std::vector<std::string>& out_;
  bool was_match_ = false, has_any_ = false;
};

class RegexSplitter : public Splitter {
 public:
  RegexSplitter(const std::string& pattern, Behaviour behaviour, bool is_inverted)
      : regex_(pattern), behaviour_(behaviour), is_inverted_(is_inverted) {}

  void split(std::string_view piece, bool, std::vector<std::string>& out) const override {
    Parts parts(behaviour_, out);
    int64_t steps = 1'000'000 + 256 * static_cast<int64_t>(piece.size());
    size_t between = 0;
    for (size_t place = 0; place < piece.size();) {
      const size_t end = regex_.match(piece, place, steps);
      if (end == piece.npos) {
        next_point(piece, place);
        continue;
      }
      parts.add(piece.substr(between, place - between), is_inverted_);
      parts.add(piece.substr(place, end - place), !is_inverted_);
      between = place = end;
    }
    parts.add(piece.substr(between), is_inverted_);
  }

 private:
  const Regex regex_;
  const Behaviour behaviour_;
  const bool is_inverted_;
};

class TextSplitter : public Splitter {
 public:
  TextSplitter(std::string pattern, Behaviour behaviour, bool is_inverted)
      : pattern_(std::move(pattern)), behaviour_(behaviour), is_inverted_(is_inverted) {
    if (pattern_.empty()) refuse("tokenizer.json: a split at nothing is not supported");
  }

  void split(std::string_view piece, bool, std::vector<std::string>& out) const override {
    Parts parts(behaviour_, out);
    for (size_t place = 0;;) {
      const size_t found = piece.find(pattern_, place);
      parts.add(piece.substr(place, found == piece.npos ? found : found - place), is_inverted_);
      if (found == piece.npos) return;
      parts.add(pattern_, !is_inverted_);
      place = found + pattern_.size();
    }
  }

 private:
  const std::string pattern_;
  const Behaviour behaviour_;
  const bool is_inverted_;
};

class DigitSplitter : public Splitter {
 public:
  explicit DigitSplitter(bool alone) : alone_(alone) {}

  void split(std::string_view piece, bool, std::vector<std::string>& out) const override {
    bool was_digit = false;
    for (size_t place = 0, start = 0; place < piece.size(); start = place) {
      const bool is_digit = contains(kDigits, next_point(piece, place));
      const bool joins = start > 0 && is_digit == was_digit && !(is_digit && alone_);
      if (joins) out.back().append(piece.substr(start, place - start));
      else out.emplace_back(piece.substr(start, place - start));
      was_digit = is_digit;
    }
  }

 private:
  const bool alone_;
};

class ByteLevelSplitter : public Splitter {
 public:
  explicit ByteLevelSplitter(const Json& described)
      : adds_space_(described.at("add_prefix_space").truth("add_prefix_space")) {
    const Json* uses = described.find("use_regex");
    if (uses == nullptr || uses->truth("use_regex")) {
      words_ = std::make_unique<RegexSplitter>(kGpt2, Behaviour::kIsolated, false);
    }
  }

  void split(std::string_view piece, bool is_first, std::vector<std::string>& out) const override {
    const std::string text = adds_space_ && piece.substr(0, 1) != " " ? " " + std::string(piece) : std::string(piece);
    const size_t begin = out.size();
    if (words_) words_->split(text, is_first, out);
    else out.push_back(text);
    for (size_t index = begin; index < out.size(); ++index) out[index] = to_byte_letters(out[index]);
  }

 private:
  const bool adds_space_;
  std::unique_ptr<Splitter> words_;
};

class MetaspaceSplitter : public Splitter {
 public:
  explicit MetaspaceSplitter(const Json& described) : mark_(described.at("replacement").text("replacement")) {
    size_t end = 0;
    if (!mark_.empty()) next_point(mark_, end);
    if (end != mark_.size() || mark_.empty())
      refuse("tokenizer.json: the replacement of Metaspace is not one character");
    scheme_ = described.at("prepend_scheme").text("prepend_scheme");
    if (scheme_ != "always" && scheme_ != "first" && scheme_ != "never") {
      refuse("tokenizer.json: the prepend_scheme " + quote_short(scheme_) + " of Metaspace is not supported");
    }
    const Json* cuts = described.find("split");
    if (cuts == nullptr || cuts->truth("split")) {
      words_ = std::make_unique<TextSplitter>(mark_, Behaviour::kMergedWithNext, false);
    }
  }

  void split(std::string_view piece, bool is_first, std::vector<std::string>& out) const override {
    std::string text;
    for (const char letter : piece) letter == ' ' ? text += mark_ : text += letter;
    const bool begins = text.compare(0, mark_.size(), mark_) == 0;
    if (!begins && (scheme_ == "always" || (scheme_ == "first" && is_first))) text.insert(0, mark_);
    if (words_) words_->split(text, is_first, out);
    else out.push_back(std::move(text));
  }

 private:
  const std::string mark_;
  std::string scheme_;
  std::unique_ptr<Splitter> words_;
};

std::unique_ptr<Splitter> splitter_of(const Json& described) {
  const Behaviour behaviour = behaviour_of(described);
  const bool is_inverted = described.at("invert").truth("invert");
  const Json& pattern = described.at("pattern");
  if (const Json* text = pattern.find("String")) {
    return std::make_unique<TextSplitter>(text->text("pattern"), behaviour, is_inverted);
  }
  return std::make_unique<RegexSplitter>(pattern.at("Regex").text("pattern"), behaviour, is_inverted);
}

}  // namespace

PreTokenizer::PreTokenizer(const Json* described) {
  if (described != nullptr) add(*described, 0);
}

void PreTokenizer::add(const Json& described, int depth) {
  const std::string& kind = described.at("type").text("type");
  if (kind == "Sequence" && depth < kDeepest) {
    for (const Json& each : described.at("pretokenizers").list("pretokenizers")) add(each, depth + 1);
    return;
  }
  if (kind == "ByteLevel") steps_.push_back(std::make_unique<ByteLevelSplitter>(described));
  else if (kind == "Digits")
    steps_.push_back(std::make_unique<DigitSplitter>(described.at("individual_digits").truth("individual_digits")));
  else if (kind == "Split") steps_.push_back(splitter_of(described));
  else if (kind == "Metaspace") steps_.push_back(std::make_unique<MetaspaceSplitter>(described));
  else refuse("tokenizer.json: the pre-tokenizer " + quote_short(kind) + " is not supported");
  if (steps_.size() > kMostSteps) refuse("tokenizer.json: its pre-tokenizer has too many steps");
}

std::vector<std::string> PreTokenizer::operator()(std::string piece, bool is_first) const {
  std::vector<std::string> pieces{std::move(piece)};
  for (const auto& step : steps_) {
    std::vector<std::string> parts;
    for (size_t index = 0; index < pieces.size(); ++index) step->split(pieces[index], is_first && index == 0, parts);
    pieces = std::move(parts);
  }
  return pieces;
}

}  // namespace edgekit
