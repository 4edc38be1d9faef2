#include "normalizer.h"

#include "errors.h"
#include "normal_form.h"

namespace edgekit {
namespace {

constexpr int kDeepest = 8;
constexpr size_t kMostSteps = 32;
constexpr size_t kLongest = 64;  // bytes of a replacement

}  // namespace

std::string replaced(std::string_view text, const std::string& pattern, const std::string& content) {
  std::string out;
  for (size_t place = 0;;) {
    const size_t found = text.find(pattern, place);
    if (found == text.npos) return out.append(text.substr(place));
    out.append(text.substr(place, found - place)).append(content);
    place = found + pattern.size();
  }
}

const std::string& literal_pattern(const Json& described) {
  const Json* pattern = described.at("pattern").find("String");
  if (pattern == nullptr) refuse("tokenizer.json: a replacement by a regular expression is not supported");
  if (pattern->text("pattern").empty()) refuse("tokenizer.json: a replacement of nothing is not supported");
  return pattern->text("pattern");
}

Normalizer::Normalizer(const Json* described) {
  if (described != nullptr) add(*described, 0);
}

void Normalizer::add(const Json& described, int depth) {
  const std::string& kind = described.at("type").text("type");
  if (kind == "Sequence" && depth < kDeepest) {
    for (const Json& each : described.at("normalizers").list("normalizers")) add(each, depth + 1);
  } else if (kind == "Replace") {
    steps_.push_back({Step::kReplace, literal_pattern(described), described.at("content").text("content")});
  } else if (kind == "Prepend") {
    steps_.push_back({Step::kPrepend, "", described.at("prepend").text("prepend")});
  } else if (kind == "NFC") {
    steps_.push_back({Step::kCompose, "", ""});
  } else {
    refuse("tokenizer.json: the normalizer " + quote_short(kind) + " is not supported");
  }
  if (steps_.size() > kMostSteps || (!steps_.empty() && steps_.back().content.size() > kLongest)) {
    refuse("tokenizer.json: its normalizer has too many steps or too long ones");
  }
}

std::string Normalizer::operator()(std::string_view text) const {
  std::string out(text);
  for (const Step& step : steps_) {
    if (step.kind == Step::kReplace) out = replaced(out, step.pattern, step.content);
    else if (step.kind == Step::kCompose) out = normal_form_c(out);
    else if (!out.empty()) out.insert(0, step.content);
  }
  return out;
}

}  // namespace edgekit
