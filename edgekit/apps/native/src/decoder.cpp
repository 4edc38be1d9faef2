#include "decoder.h"

#include <numeric>

#include "byte_letters.h"
#include "errors.h"
#include "normalizer.h"
#include "utf8.h"

namespace edgekit {
namespace {

constexpr int kDeepest = 8;
constexpr size_t kMostSteps = 32;
using Tokens = std::vector<std::string>;

std::string joined(const Tokens& tokens) { return std::accumulate(tokens.begin(), tokens.end(), std::string()); }

std::string from_byte_letters(const Tokens& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) {
    std::string found;
    bool is_whole = true;
    for (size_t place = 0; place < token.size() && is_whole;) {
      const int byte = byte_of_letter(next_point(token, place));
      is_whole = byte >= 0;
      found += static_cast<char>(byte);
    }
    bytes += is_whole ? found : token;  // an added token stands for itself
  }
  return repaired(bytes);
}

// Runs of raw bytes as text, or each byte as U+FFFD where they are none.
Tokens from_raw_bytes(const Tokens& tokens) {
  Tokens out;
  std::string run;
  const auto end_run = [&] {
    if (run.empty()) return;
    if (first_invalid(run) == run.size()) out.push_back(run);
    else out.insert(out.end(), run.size(), std::string(kReplacement));
    run.clear();
  };
  for (const std::string& token : tokens) {
    const int byte = byte_of_token(token);
    if (byte >= 0) {
      run += static_cast<char>(byte);
      continue;
    }
    end_run();
    out.push_back(token);
  }
  end_run();
  return out;
}

std::string stripped(const std::string& token, const std::string& content, size_t start, size_t stop) {
  size_t begin = 0, end = token.size();
  for (; start > 0 && token.compare(begin, content.size(), content) == 0 && begin < end; --start)
    begin += content.size();
  for (; stop > 0 && end >= begin + content.size(); --stop, end -= content.size()) {
    if (token.compare(end - content.size(), content.size(), content) != 0) break;
  }
  return token.substr(begin, end - begin);
}

}  // namespace

int byte_of_token(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int found = 0;
  for (const char digit : token.substr(3, 2)) {
    const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                      : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                      : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                                                     : -1;
    if (value < 0) return -1;
    found = found * 16 + value;
  }
  return found;
}

Decoder::Decoder(const Json* described) {
  if (described == nullptr) refuse("tokenizer.json: it has no decoder, which is not supported");
  add(*described, 0);
}

void Decoder::add(const Json& described, int depth) {
  const std::string& kind = described.at("type").text("type");
  if (kind == "Sequence" && depth < kDeepest) {
    for (const Json& each : described.at("decoders").list("decoders")) add(each, depth + 1);
    return;
  }
  if (kind == "ByteLevel") {
    steps_.push_back({Kind::kByteLevel, "", ""});
  } else if (kind == "Replace") {
    steps_.push_back({Kind::kReplace, literal_pattern(described), described.at("content").text("content")});
  } else if (kind == "ByteFallback") {
    has_byte_fallback_ = true;
    steps_.push_back({Kind::kByteFallback, "", ""});
  } else if (kind == "Fuse") {
    steps_.push_back({Kind::kFuse, "", ""});
  } else if (kind == "Strip") {
    const int64_t start = described.at("start").whole("start"), stop = described.at("stop").whole("stop");
    const std::string& content = described.at("content").text("content");
    if (start < 0 || stop < 0 || content.empty()) refuse("tokenizer.json: the decoder Strip has bounds below 0");
    steps_.push_back({Kind::kStrip, "", content, static_cast<size_t>(start), static_cast<size_t>(stop)});
  } else if (kind == "Metaspace") {
    const std::string& scheme = described.at("prepend_scheme").text("prepend_scheme");
    steps_.push_back({Kind::kMetaspace, described.at("replacement").text("replacement"), scheme});
    if (steps_.back().pattern.empty()) refuse("tokenizer.json: the replacement of Metaspace is empty");
  } else {
    refuse("tokenizer.json: the decoder " + quote_short(kind) + " is not supported");
  }
  if (steps_.size() > kMostSteps) refuse("tokenizer.json: its decoder has too many steps");
}

std::string Decoder::operator()(Tokens tokens) const {
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel: tokens = {from_byte_letters(tokens)}; break;
      case Kind::kByteFallback: tokens = from_raw_bytes(tokens); break;
      case Kind::kFuse: tokens = {joined(tokens)}; break;
      case Kind::kReplace:
        for (std::string& each : tokens) each = replaced(each, step.pattern, step.content);
        break;
      case Kind::kStrip:
        for (std::string& each : tokens) each = stripped(each, step.content, step.start, step.stop);
        break;
      case Kind::kMetaspace:
        for (size_t index = 0; index < tokens.size(); ++index) {
          const bool is_dropped = index == 0 && step.content != "never";
          tokens[index] = replaced(tokens[index], step.pattern, is_dropped ? "" : " ");
        }
        break;
    }
  }
  return joined(tokens);
}

}  // namespace edgekit
