// The command line of the runner. One line on stderr and exit code 2 where something cannot be done.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "answer.h"
#include "bench.h"
#include "machine.h"
#include "program.h"

namespace {

constexpr const char kUsage[] =
    "usage: edgekit_runner measure FOLDER QUESTION [--meminfo FILE]   one Measurement, as `edgekit bench --json`\n"
    "       edgekit_runner generate PROGRAM THREADS CHUNK COUNT TOKEN...   the likeliest tokens after a prompt\n"
    "       edgekit_runner load PROGRAM THREADS   seconds until a program can be run\n"
    "       edgekit_runner read THREADS   GB/s that memory is read with\n"
    "       edgekit_runner version\n"
    "EDGEKIT_OPERATORS names libraries, separated by colons, that register operators.\n";

int number(const std::string& text) {
  char* end = nullptr;
  const long found = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != 0 || found < 0 || found > 1 << 24) throw std::runtime_error(text + ": is no number here");
  return static_cast<int>(found);
}

void bring_operators() {
  const char* named = std::getenv("EDGEKIT_OPERATORS");
  std::istringstream paths(named ? named : "");
  for (std::string path; std::getline(paths, path, ':');) {
    if (!path.empty()) edgekit::load_operators(path);
  }
}

int generated(const std::vector<std::string>& words) {
  Program program(words[1], number(words[2]), Program::Method::kForward);
  std::vector<int64_t> prompt, written;
  for (size_t i = 5; i < words.size(); ++i) prompt.push_back(number(words[i]));
  const Times times = generate(program, prompt, 0, number(words[4]), number(words[3]), written);
  for (const int64_t token : written) std::printf("%lld ", static_cast<long long>(token));
  std::printf("\n");
  const double steps = static_cast<double>(times.tokens - 1);
  std::fprintf(stderr, "prefill %.4f s, decode %.1f tokens/s\n", times.prefill_s,
               times.decode_s > 0 ? steps / times.decode_s : 0.0);
  return 0;
}

int run_words(const std::vector<std::string>& words) {
  const double began = now_s();
  const std::string asked = words.empty() ? "" : words[0];
  if (asked == "version" && words.size() == 1) {
    std::printf("edgekit runner, executorch %s\n", Program::version());
    return 0;
  }
  if (asked == "read" && words.size() == 2 && number(words[1]) > 0) {
    std::printf("%.3f\n", read_speed_gb_s(number(words[1])));
    return 0;
  }
  bring_operators();
  if (asked == "load" && words.size() == 3) {
    Program program(words[1], number(words[2]), Program::Method::kForward);
    std::printf("%.6f\n", now_s() - began);
    return 0;
  }
  if (asked == "generate" && words.size() >= 6) return generated(words);
  if (asked == "measure" && (words.size() == 3 || (words.size() == 5 && words[3] == "--meminfo"))) {
    const Answer found = answer(words[1], words[2], words.size() == 5 ? words[4] : "");
    std::printf("%s\n", found.line.c_str());
    return found.is_valid ? 0 : 4;
  }
  std::fputs(kUsage, stderr);
  return 2;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run_words(std::vector<std::string>(words + 1, words + count));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "edgekit_runner: %s\n", error.what());
    return 2;
  }
}
