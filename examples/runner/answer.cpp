#include "answer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

#include "bench.h"
#include "machine.h"
#include "program.h"
#include "sha256.h"

using edgekit::Json;

namespace {

constexpr int64_t kVersion = 1;
constexpr std::streamoff kMostBytes = 256 << 20;

std::string read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(path + ": cannot be read; push it again");
  if (file.tellg() > kMostBytes) throw std::runtime_error(path + ": is too large");
  std::string found(static_cast<size_t>(file.tellg()), '\0');
  file.seekg(0);
  file.read(found.data(), static_cast<std::streamsize>(found.size()));
  if (!file) throw std::runtime_error(path + ": cannot be read to its end; push it again");
  return found;
}

int small(const Json& from, const char* name, int64_t least) {
  const int64_t found = from.at(name).whole(name);
  if (found < least || found > 100000) throw std::runtime_error(std::string(name) + ": is out of range");
  return static_cast<int>(found);
}

std::vector<Case> cases_of(const Json& question) {
  std::vector<Case> found;
  for (const Json& each : question.at("cases").list("cases")) {
    Case one;
    one.name = each.at("case").text("case");
    if (!each.at("refused").is_null()) one.refused = each.at("refused").text("refused");
    for (const Json& asked : each.at("requests").list("requests")) {
      Request request;
      for (const Json& token : asked.at("tokens").list("tokens")) request.tokens.push_back(token.whole("tokens"));
      request.depth = asked.at("depth").whole("depth");
      request.outputs = asked.at("outputs").whole("outputs");
      request.continues = asked.at("continues").truth("continues");
      one.requests.push_back(std::move(request));
    }
    if (one.requests.empty()) throw std::runtime_error(one.name + ": has no requests");
    found.push_back(std::move(one));
  }
  if (found.empty()) throw std::runtime_error("no cases");
  return found;
}

// The files are those that were asked for: the manifest by its hash, the program by what the manifest says of it.
std::string checked_program(const std::string& folder, const Json& question) {
  const std::string manifest = read_whole(folder + "/manifest.json");
  const std::string asked = question.at("artifact_sha256").text("artifact_sha256"), found = edgekit::sha256_of(manifest);
  if (asked != found) throw std::runtime_error(folder + ": holds artifact " + found + ", and " + asked + " was asked for");
  const std::string name = question.at("program").text("program");
  const Json stated = Json::parse(manifest);
  const std::string path = folder + "/" + name;
  if (name.find('/') != std::string::npos) throw std::runtime_error(name + ": is no plain name of a file");
  if (edgekit::sha256_of_file(path) != stated.at("files").at(name).at("sha256").text("sha256")) {
    throw std::runtime_error(path + ": its bytes are not those of its manifest; push it again");
  }
  return path;
}

// What the whole measurement is worth, and why not more.
std::pair<std::string, std::string> status_of(const std::vector<Case>& cases,
                                              const std::vector<std::vector<Trial>>& trials) {
  std::string names;
  int disturbed = 0, throttled = 0;
  bool ran = false;
  for (size_t index = 0; index < cases.size(); ++index) {
    if (cases[index].refused) continue;
    ran = true;
    const auto& made = trials[index];
    if (std::any_of(made.begin(), made.end(), [](const Trial& trial) { return !trial.invalid; })) continue;
    names += (names.empty() ? "" : ", ") + cases[index].name;
    disturbed += static_cast<int>(made.size());
    for (const Trial& trial : made) throttled += trial.invalid == "throttled";
  }
  if (!ran) return {"refused", *cases.front().refused};
  if (names.empty()) return {"valid", ""};
  return {disturbed == throttled ? "throttled" : "contended",
          std::to_string(disturbed) + " trials of " + names +
              " were disturbed and none was not; run again on an idle machine"};
}

std::optional<double> read_speed(int threads) {
  try {
    const std::string told = asked_anew({"read", std::to_string(threads)});
    return std::strtod(told.c_str(), nullptr);
  } catch (const std::runtime_error&) {
    return std::nullopt;  // a machine without that much memory to spare
  }
}

void tell_meminfo(const std::string& path) {
  // `path` is quoted for the shell by having nothing in it that a shell would see.
  if (path.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-") != std::string::npos) {
    throw std::runtime_error("--meminfo: give a plain path");
  }
  const std::string command = "dumpsys meminfo " + std::to_string(getpid()) + " > " + path + " 2>/dev/null";
  if (std::system(command.c_str()) != 0) unlink(path.c_str());
}

}  // namespace

Answer answer(const std::string& folder, const std::string& question_path, const std::string& meminfo) {
  const Json question = Json::parse(read_whole(question_path));
  if (question.at("version").whole("version") != kVersion) throw std::runtime_error("a question of another version");
  const std::string path = checked_program(folder, question);
  const std::vector<Case> cases = cases_of(question);
  const int asked_threads = small(question, "threads", 1);
  const int threads = std::min(asked_threads, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  Rules rules;
  rules.warmups = small(question, "warmups", 0);
  rules.repeats = small(question, "repeats", 1);
  rules.attempts = small(question, "attempts", 1);
  rules.cool_down_s = question.at("cool_down_s").number("cool_down_s");
  rules.contended_share = question.at("contended_share").number("contended_share");
  rules.throttled = question.at("throttled").number("throttled");

  Json::List load_s, notes;
  const auto read_before = read_speed(threads);
  for (int place = small(question, "loads", 1); place > 1; --place) {
    load_s.emplace_back(std::strtod(asked_anew({"load", path, std::to_string(threads)}).c_str(), nullptr));
  }
  const double began = now_s();
  Program program(path, threads, Program::Method::kForward);
  load_s.emplace_back(now_s() - began);
  const int64_t planned = small(question, "chunk_tokens", 1);
  rules.chunk = question.at("exact").truth("exact") ? 1 : std::min(planned, program.chunk());

  Machine machine(program.threads());
  const auto trials = run(program, machine, cases, rules);
  if (!meminfo.empty()) tell_meminfo(meminfo);
  const Json memory = memory_now();
  const auto read_after = read_speed(threads);

  if (edgekit::has_own_attention()) {
    notes.emplace_back("attention: by the runner's own kernels; ExecuTorch's are not in what it was linked with");
  }
  if (program.threads() != asked_threads) {
    notes.emplace_back("computes with " + std::to_string(program.threads()) + " threads, " +
                       std::to_string(asked_threads) + " were planned");
  }

  Json::List told;
  const auto& asked_cases = question.at("cases").list("cases");
  for (size_t index = 0; index < cases.size(); ++index) {
    Json::List made;
    for (const Trial& trial : trials[index]) made.push_back(trial.json());
    const Json& asked = asked_cases[index];
    const Json summary = summary_of(trials[index]);
    const int64_t touched = asked.at("bytes_per_token").whole("bytes_per_token");
    std::optional<double> roofline;
    for (const auto& [name, figures] : summary.members("summary")) {
      if (name == "decode_tokens_per_s" && read_before && *read_before > 0) {
        roofline = static_cast<double>(touched) * figures.at("median").number("median") / (*read_before * 1e9);
      }
    }
    told.push_back(Json::Members{
        {"case", cases[index].name},
        {"prompt_tokens", asked.at("prompt_tokens")},
        {"depth_tokens", asked.at("depth_tokens")},
        {"refused", cases[index].refused},
        {"trials", made},
        {"summary", summary},
        {"roofline", roofline},
        {"bytes_per_token", touched},
    });
  }

  const auto [status, why] = status_of(cases, trials);
  Json arm = question.at("arm");
  arm.set("engine_version", std::string("executorch ") + Program::version());
  arm.set("threads", program.threads());
  const Json found = Json::Members{
      {"version", 1},
      {"kind", "measurement"},
      {"status", status},
      {"why", why},
      {"arm", arm},
      {"workload", question.at("workload")},
      {"workload_sha256", question.at("workload_sha256")},
      {"conditions", conditions_of(machine, read_before, read_after,
                                   {{"executorch", Program::version()}, {"compiler", __VERSION__}})},
      {"load_s", load_s},
      {"memory", memory},
      {"predicted", question.at("predicted")},
      {"cases", told},
      {"notes", notes},
  };
  return {found.line(), status == "valid"};
}
