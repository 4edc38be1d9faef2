// Damages tokenizers and manifests and reads them with the native library, thousands a second in one process.
//
//   native_fuzzer NOTE FIRST COUNT tokenizer FILE...
//   native_fuzzer NOTE FIRST COUNT manifest FOLDER FILE...   manifests without seals, and an artifact to put them into
//
// Cases have numbers, and a number is the same case in every run. NOTE is a file that holds the number of the case that
// is being read, for when the process ends; with a COUNT of 0, the damaged file of FIRST is written to standard output.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "artifact.h"
#include "json.h"
#include "plan.h"
#include "sha256.h"
#include "tokenizer.h"

namespace {

constexpr double kMostSeconds = 1.0;  // of the processor, for a case
constexpr unsigned kMostHungSeconds = 120;
constexpr size_t kMostErrorBytes = 5000;
constexpr const char* kText = "the cat sat on façade 日本 <tool_call> 12\n";
constexpr const char* kObjectEnds = "\n}\n";
// Characters that patterns, templates of special tokens and JSON itself give a meaning to.
constexpr const char kLetters[] = "[]{}()|\\^$*+?.:-,\"pPLNsdASx0123456789 \n\x80\xc3\xf0";

class Draw {  // splitmix64
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}
  size_t below(size_t bound) {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t mixed = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return static_cast<size_t>((mixed ^ (mixed >> 31)) % std::max<size_t>(bound, 1));
  }
  template <typename Value>
  const Value& of(const std::vector<Value>& values) {
    return values[below(values.size())];
  }

 private:
  uint64_t state_;
};

std::string repeated(const std::string& text, size_t times) {
  std::string all;
  for (size_t each = 0; each < times; ++each) all += text;
  return all;
}

const std::vector<std::string>& odd_values() {
  static const std::vector<std::string> values = {
      "null", "true", "false", "-1", "0", "1", "2", "3", "7", "1000", "65537", "1000000000", "1000000000000",
      "9223372036854775807", "9223372036854775808", "18446744073709551616", "1" + repeated("0", 400), "-0.0", "0.5",
      "1e-300", "1e308", "1e999", "\"\"", "\"x\"", "\"\\n\"", "\"\\u0000\"", "\"\\ud800\"", "\"../x\"",
      "\"/etc/passwd\"", "\"" + repeated("\xc3\xa9", 300) + "\"", "\"" + repeated("x", 20000) + "\"", "[]", "[0]",
      "[-1, 1e308]", "{}", "{\"x\": 0}", "[[]]", repeated("[", 2000) + repeated("]", 2000), "\"default\"", "\"yarn\"",
      "\"longrope\"", "\"cpu\"", "\"onnx\"", "\"1\"", "\"" + repeated("a", 64) + "\""};
  return values;
}

struct Value {  // of a JSON text
  size_t begin, end;
  std::optional<size_t> key;  // where its member begins
  size_t member;              // of the whole object, in which it is
};

// The values of a valid JSON text.
class Values {
 public:
  explicit Values(const std::string& text) : text_(text) { read(std::nullopt, 0); }

  const std::vector<Value>& all() const { return all_; }
  std::vector<std::vector<Value>> by_member() const {
    std::vector<std::vector<Value>> groups(members_ + 1);
    for (const Value& value : all_) groups[value.member].push_back(value);
    return groups;
  }

 private:
  void skip() { at_ = std::min(text_.find_first_not_of(" \n\t\r,:", at_), text_.size()); }
  void skip_text() {
    for (++at_; text_[at_] != '"'; ++at_) at_ += text_[at_] == '\\';
    ++at_;
  }
  void read(std::optional<size_t> key, int depth) {
    const size_t begin = at_, place = all_.size();
    all_.push_back({begin, 0, key, members_});
    const char first = text_[at_];
    if (first == '{' || first == '[') {
      for (++at_, skip(); text_[at_] != '}' && text_[at_] != ']'; skip()) {
        std::optional<size_t> inner;
        if (depth == 0) ++members_;
        if (first == '{') inner = at_, skip_text(), skip();
        read(inner, depth + 1);
      }
      ++at_;
    } else if (first == '"') {
      skip_text();
    } else {
      at_ = text_.find_first_of(",]} \n", at_);
    }
    all_[place].end = at_;
  }

  const std::string& text_;
  size_t at_ = 0, members_ = 0;
  std::vector<Value> all_;
};

struct Whole {
  explicit Whole(std::string data) : text(std::move(data)), groups(Values(text).by_member()) {
    for (const auto& group : groups) {
      for (const Value& value : group) {
        others.push_back(text.substr(value.begin, std::min<size_t>(value.end - value.begin, 400)));
        if (value.key) keys.push_back(text.substr(*value.key, text.find('"', *value.key + 1) + 1 - *value.key));
      }
    }
  }
  std::string text;
  std::vector<std::vector<Value>> groups;   // most of a tokenizer is its vocabulary: a member is drawn before a value
  std::vector<std::string> others, keys;  // what may stand in the place of another
};

void change_letters(std::string& text, size_t begin, size_t end, Draw& draw) {
  for (size_t count = 1 + draw.below(3); count > 0; --count) {
    const size_t at = std::min(begin + draw.below(end - begin), text.size());
    const std::string letters(1 + draw.below(2), kLetters[draw.below(sizeof kLetters - 1)]);
    text.replace(at, std::min(draw.below(3), text.size() - at), letters);
  }
}

void change_value(std::string& text, const Value& value, const Whole& whole, Draw& draw) {
  const std::string old = text.substr(value.begin, value.end - value.begin);
  const size_t start = value.key.value_or(value.begin);
  const auto put = [&](const std::string& now) { text.replace(value.begin, old.size(), now); };
  switch (draw.below(11)) {
    case 0:
    case 1: return put(draw.of(odd_values()));
    case 2: return put(draw.of(whole.others));
    case 3: return change_letters(text, value.begin, value.end, draw);
    case 4: {  // without its comma, unless it is the last
      const size_t after = text.find_first_not_of(" \n", value.end);
      const bool has_comma = after != text.npos && text[after] == ',';
      return static_cast<void>(text.erase(start, (has_comma ? after + 1 : value.end) - start));
    }
    case 5: return static_cast<void>(text.insert(start, text.substr(start, value.end - start) + ", "));
    case 6: {
      if (!value.key) return put("[" + old + "]");
      const std::string& key = draw.of(whole.keys);
      return static_cast<void>(text.replace(start, text.find('"', start + 1) + 1 - start, key));
    }
    case 7: return put(draw.below(2) == 0 ? "[" + old + "]" : "{\"x\": " + old + "}");
    case 8:
      if (old[0] == '"') return put("\"" + repeated(old.substr(1, old.size() - 2), 1 + draw.below(300)) + "\"");
      if (old[0] == '[' && old.size() > 2 && old.size() < 4000)
        return put("[" + repeated(old.substr(1, old.size() - 2) + ",", draw.below(30)) + old.substr(1));
      return put(old + "0");
    case 9: return old[0] == '"' && old.size() > 2 ? put(old.substr(0, 1 + draw.below(old.size() - 1)) + "\"") : put("-" + old);
    default: return put(old + draw.of(whole.others));
  }
}

void change_bytes(std::string& text, Draw& draw) {
  const size_t at = draw.below(text.size()), size = text.size() - at;
  switch (draw.below(5)) {
    case 0: text[at] = static_cast<char>(draw.below(256)); break;
    case 1: text[at] = static_cast<char>(text[at] ^ (1 << draw.below(8))); break;
    case 2: text.erase(at, std::min<size_t>(size, 1 + draw.below(100))); break;
    case 3: text.insert(at, text.substr(draw.below(text.size()), 1 + draw.below(1000))); break;
    default: text.erase(at); break;
  }
}

std::string damaged(const Whole& whole, Draw& draw) {
  std::string text = whole.text;
  if (draw.below(5) == 0) {
    for (size_t count = 1 + draw.below(4); count > 0 && !text.empty(); --count) change_bytes(text, draw);
    return text;
  }
  const Value first = draw.of(draw.of(whole.groups)), second = draw.of(draw.of(whole.groups));
  const bool are_apart = first.end < second.key.value_or(second.begin) && draw.below(2) == 0;
  if (are_apart) change_value(text, second, whole, draw);  // the later one first: the places before it stay
  change_value(text, first, whole, draw);
  return text;
}

// As Python's sealed_json adds it; what ends otherwise stays without.
std::string sealed(const std::string& text) {
  const size_t end = std::strlen(kObjectEnds);
  if (text.size() < end || text.compare(text.size() - end, end, kObjectEnds) != 0) return text;
  const std::string body = text.substr(0, text.size() - end);
  return body + ",\n \"seal\": \"" + edgekit::sha256_of(body) + "\"\n}\n";
}

void read_tokenizer(const std::string& data) {
  const edgekit::Tokenizer tokenizer(data);
  tokenizer.decode(tokenizer.encode(kText, true), false);
  tokenizer.decode({0, 1, 300, 5, 1 << 30, -1, 263}, true);
}

void read_manifest(const std::string& data, const std::string& folder) {
  std::ofstream(folder + "/manifest.json", std::ios::binary | std::ios::trunc) << sealed(data);
  std::optional<std::string> refusal;
  try {
    edgekit::Artifact artifact(folder);
    for (const char* name : {"tokenizer.json", "a/b.bin"}) {
      if (artifact.has(name)) artifact.read(name, 1u << 20);
    }
  } catch (const std::runtime_error& error) {
    refusal = error.what();
  }
  const edgekit::Plan plan(edgekit::Json::parse(data).at("plan"));  // also where the files are refused
  if (refusal) throw std::runtime_error(*refusal);
}

[[noreturn]] void fail(uint64_t number, const std::string& why) {
  std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(number), why.c_str());
  std::exit(1);
}

std::string contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string(path) + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

uint64_t* shared_number(const char* path) {
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(uint64_t)) != 0) throw std::runtime_error(std::string(path) + " cannot be written");
  void* place = mmap(nullptr, sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (place == MAP_FAILED) throw std::runtime_error(std::string(path) + " cannot be mapped");
  return static_cast<uint64_t*>(place);
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) return 2;
  uint64_t* note = shared_number(words[1]);
  const uint64_t first = std::strtoull(words[2], nullptr, 10), cases = std::strtoull(words[3], nullptr, 10);
  const bool is_manifest = std::string(words[4]) == "manifest";
  const std::string folder = is_manifest ? words[5] : "";
  const std::function<void(const std::string&)> read =
      is_manifest ? [&](const std::string& data) { read_manifest(data, folder); }
                  : std::function<void(const std::string&)>(read_tokenizer);
  std::vector<Whole> wholes;
  for (int each = is_manifest ? 6 : 5; each < count; ++each) {
    wholes.emplace_back(contents(words[each]));
    read(wholes.back().text);
  }
  const auto made = [&](uint64_t number) {
    Draw draw(number + 1);
    return damaged(draw.of(wholes), draw);
  };
  if (cases == 0) return std::fputs(made(first).c_str(), stdout) < 0;
  uint64_t opened = 0;
  double slowest = 0.0;
  std::set<std::string> refusals;  // without numbers and names
  for (uint64_t number = first; number < first + cases; ++number) {
    *note = number;
    if (number % 1000 == 0) alarm(kMostHungSeconds);
    const std::string data = made(number);
    const std::clock_t began = std::clock();
    try {
      read(data);
      ++opened;
    } catch (const std::runtime_error& error) {
      const std::string why = error.what();
      if (why.empty() || why.size() > kMostErrorBytes || why.find('\n') != why.npos) fail(number, "refused with " + why);
      std::string kind;
      for (size_t at = folder.empty() || why.rfind(folder, 0) != 0 ? 0 : folder.size(); at < why.size() && kind.size() < 40; ++at) {
        if (why[at] == '\'' || why[at] == '"') break;
        if (std::isalpha(static_cast<unsigned char>(why[at])) || why[at] == ' ') kind += why[at];
      }
      refusals.insert(kind);
    } catch (const std::exception& error) {
      fail(number, std::string("raised ") + error.what());
    }
    const double took = static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
    slowest = std::max(slowest, took);
    if (took > kMostSeconds) fail(number, "took " + std::to_string(took) + " s");
  }
  std::printf("%llu %llu %zu %.0f\n", static_cast<unsigned long long>(opened),
              static_cast<unsigned long long>(cases - opened), refusals.size(), slowest * 1000.0);
  return 0;
}
