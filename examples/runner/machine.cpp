#include "machine.h"

#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "sha256.h"

using edgekit::Json;

namespace {

constexpr size_t kCanaryBytes = 2 << 20;
constexpr int kRounds = 3;
constexpr double kLongEnough = 0.2;   // the kernel counts busy cores in hundredths of a second, by sampling
constexpr double kRounded = 0.03;     // seconds that counters may be off by
constexpr size_t kReadBytes = 256 << 20;

// Kept to printable ASCII: what a system's files hold goes into JSON.
std::string trimmed(const std::string& text) {
  std::string found;
  for (const char each : text) {
    if (each >= 0x20 && each < 0x7f) found += each;
  }
  const size_t first = found.find_first_not_of(' '), last = found.find_last_not_of(' ');
  return first == std::string::npos ? "" : found.substr(first, std::min<size_t>(last - first + 1, 400));
}

std::optional<std::string> text_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string found((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return found;
}

std::vector<std::string> listed(const std::string& folder, const std::string& prefix) {
  std::vector<std::string> found;
  if (DIR* open = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(open)) {
      if (std::string(entry->d_name).rfind(prefix, 0) == 0 && entry->d_name[0] != '.') {
        found.push_back(folder + "/" + entry->d_name);
      }
    }
    closedir(open);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<double> number_of(const std::string& path) {
  const auto text = text_of(path);
  if (!text) return std::nullopt;
  char* end = nullptr;
  const double found = std::strtod(text->c_str(), &end);
  return end == text->c_str() ? std::nullopt : std::optional(found);
}

// The first of the named lines `name : value` of a file like /proc/meminfo.
std::optional<std::string> line_of(const std::string& path, const std::vector<std::string>& names) {
  std::istringstream text(text_of(path).value_or(""));
  for (std::string line; std::getline(text, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    if (std::find(names.begin(), names.end(), trimmed(line.substr(0, colon))) == names.end()) continue;
    return trimmed(line.substr(colon + 1));
  }
  return std::nullopt;
}

std::optional<int64_t> bytes_of(const std::string& path, const std::string& name) {
  const auto found = line_of(path, {name});
  if (!found) return std::nullopt;
  return static_cast<int64_t>(std::strtoll(found->c_str(), nullptr, 10)) << 10;
}

std::optional<double> hottest_c() {
  std::optional<double> found;
  for (const std::string& zone : listed("/sys/class/thermal", "thermal_zone")) {
    const auto told = number_of(zone + "/temp");
    if (told && *told > 0 && *told < 150000) found = std::max(found.value_or(0), *told / 1000);
  }
  return found;
}

std::optional<double> frequency_mhz() {
  std::vector<double> found;
  for (const std::string& core : listed("/sys/devices/system/cpu", "cpu")) {
    if (const auto told = number_of(core + "/cpufreq/scaling_cur_freq")) found.push_back(*told / 1000);
  }
  if (found.empty()) {
    if (const auto told = line_of("/proc/cpuinfo", {"cpu MHz"})) return std::strtod(told->c_str(), nullptr);
    return std::nullopt;
  }
  return std::accumulate(found.begin(), found.end(), 0.0) / static_cast<double>(found.size());
}

std::optional<std::string> power_source() {
  bool discharging = false;
  for (const std::string& supply : listed("/sys/class/power_supply", "")) {
    const std::string kind = trimmed(text_of(supply + "/type").value_or(""));
    if ((kind == "Mains" || kind == "USB") && number_of(supply + "/online") == 1.0) return "mains";
    discharging |= trimmed(text_of(supply + "/status").value_or("")) == "Discharging";
  }
  return discharging ? std::optional<std::string>("battery") : std::nullopt;
}

std::vector<double> counted(const std::string& text) {
  std::istringstream words(text);
  std::vector<double> found;
  for (double each = 0; words >> each;) found.push_back(each);
  return found;
}

void on_threads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> running;
  for (int index = 0; index < count; ++index) running.emplace_back(work, index);
  for (std::thread& each : running) each.join();
}

}  // namespace

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Machine::Machine(int threads) : threads_(threads), cores_(1), data_(kCanaryBytes, '\0') {
  cpu_set_t allowed;
  cores_ = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  best_s_ = std::min({canary_s(), canary_s(), canary_s()});
}

double Machine::canary() {
  const double found = canary_s();
  best_s_ = std::min(best_s_, found);
  return found / best_s_;
}

double Machine::canary_s() const {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> took(static_cast<size_t>(threads_));
    on_threads(threads_, [&](int index) {
      const double began = now_s();
      edgekit::Sha256 hash(false);  // by plain instructions: the same work on every processor
      hash.update(data_.data(), data_.size());
      volatile size_t kept = hash.hex().size();
      (void)kept;
      took[static_cast<size_t>(index)] = now_s() - began;
    });
    best = std::min(best, *std::max_element(took.begin(), took.end()));
  }
  return best;
}

Usage Machine::usage() const {
  Usage found;
  found.at_s = now_s();
  const double tick = 1.0 / static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto threads = listed("/proc/self/task", "");
  double waited = 0;
  bool all = !threads.empty();
  for (const std::string& thread : threads) {
    const auto fields = counted(text_of(thread + "/schedstat").value_or(""));
    all &= fields.size() >= 2;
    if (fields.size() >= 2) waited += fields[1] / 1e9;
  }
  if (all) found.waited_s = waited;
  const std::string own = text_of("/proc/self/stat").value_or("");
  if (const size_t name = own.rfind(')'); name != std::string::npos && name + 4 < own.size()) {
    const auto fields = counted(own.substr(name + 4));  // behind the name and the state
    if (fields.size() > 11) found.own_s = (fields[10] + fields[11]) * tick;
  }
  const std::string all_cores = text_of("/proc/stat").value_or("");
  if (all_cores.rfind("cpu ", 0) == 0) {
    const auto fields = counted(all_cores.substr(4));  // user nice system idle iowait irq softirq steal
    if (fields.size() >= 8) {
      found.busy_s = (fields[0] + fields[1] + fields[2] + fields[5] + fields[6] + fields[7]) * tick;
    }
  }
  return found;
}

Disturbance Machine::between(const Usage& before, const Usage& after) const {
  Disturbance found;
  const double wall = std::max(after.at_s - before.at_s, 1e-9);
  if (before.waited_s && after.waited_s) found.waited_share = std::max(0.0, *after.waited_s - *before.waited_s) / wall;
  if (wall >= kLongEnough && before.busy_s && after.busy_s && before.own_s && after.own_s) {
    const double others = (*after.busy_s - *before.busy_s) - (*after.own_s - *before.own_s);
    found.others_share = std::max(0.0, others - kRounded) / (wall * cores_);
  }
  return found;
}

Json conditions_of(const Machine& machine, std::optional<double> read_before, std::optional<double> read_after,
                   const Json::Members& versions) {
  utsname system{};
  uname(&system);
  const std::string os = trimmed(std::string(system.sysname) + " " + system.release);
  const auto processor = line_of("/proc/cpuinfo", {"model name", "Model", "Hardware"});
  const std::string name = processor.value_or(std::string(system.machine) + " processor");
  std::optional<double> load;
  if (const auto told = counted(text_of("/proc/loadavg").value_or("")); !told.empty()) load = told[0];
  const auto power = power_source();
  const auto heat = hottest_c(), clock = frequency_mhz();
  Json::List not_told;
  if (!power) not_told.emplace_back("power source");
  if (!heat) not_told.emplace_back("temperature");
  if (!clock) not_told.emplace_back("core frequency");
  if (!load) not_told.emplace_back("load average");
  char at[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%SZ", &utc);
  const std::string who = name + "|" + system.nodename + "|" + std::to_string(machine.cores());
  return Json::Members{
      {"measured_at", at},
      {"machine", name},
      {"machine_key", edgekit::sha256_of(who).substr(0, 16)},
      {"os", os},
      {"cores", machine.cores()},
      {"ram_bytes", bytes_of("/proc/meminfo", "MemTotal")},
      {"load_average", load},
      {"power_source", power},
      {"temperature_c", heat},
      {"frequency_mhz", clock},
      {"read_gb_s", read_before},
      {"read_gb_s_after", read_after},
      {"versions", versions},
      {"canary_s", machine.best_s()},
      {"not_told", not_told},
  };
}

Json memory_now() {
  const std::string status = "/proc/self/status", maps = "/proc/self/smaps_rollup";
  const auto peak = bytes_of(status, "VmHWM");
  return Json::Members{
      {"peak_bytes", peak},
      {"peak_counter", peak ? "VmHWM of /proc/PID/status" : "this system tells no peak"},
      {"pss_bytes", bytes_of(maps, "Pss")},
      {"anonymous_bytes", bytes_of(status, "RssAnon")},
      {"rss_bytes", bytes_of(status, "VmRSS")},
  };
}

double read_speed_gb_s(int threads) {
  const size_t words = kReadBytes / sizeof(uint64_t), each = words / static_cast<size_t>(threads);
  std::vector<uint64_t> data(words, 1);
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const double began = now_s();
    on_threads(threads, [&](int index) {
      const uint64_t* from = data.data() + static_cast<size_t>(index) * each;
      uint64_t lanes[8] = {};
      for (size_t i = 0; i + 8 <= each; i += 8) {
        for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += from[i + lane];
      }
      sums[static_cast<size_t>(index)] = std::accumulate(lanes, lanes + 8, uint64_t{0});
    });
    best = std::max(best, static_cast<double>(each * static_cast<size_t>(threads) * 8) / (now_s() - began) / 1e9);
  }
  if (std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == 0) throw std::runtime_error("memory was not read");
  return best;
}

std::string asked_anew(const std::vector<std::string>& words) {
  std::vector<char*> arguments{const_cast<char*>("edgekit_runner")};
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  int ends[2];
  if (pipe(ends) != 0) throw std::runtime_error("no pipe to a new process");
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("no new process can be started");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // whoever ends us ends it
    dup2(ends[1], 1);
    close(ends[0]);
    close(ends[1]);
    execv("/proc/self/exe", arguments.data());
    _exit(127);
  }
  close(ends[1]);
  std::string found;
  char buffer[256];
  for (ssize_t count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) {
    if (found.size() < 4096) found.append(buffer, static_cast<size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error("a new process for `" + words.front() + "` failed");
  }
  return found;
}
