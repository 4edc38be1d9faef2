// What the machine under test tells of itself, and whether something disturbs it. Linux and Android; no engine here.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "json.h"

double now_s();  // monotonic

// Counters at one moment; nothing where the system does not tell.
struct Usage {
  double at_s = 0;
  std::optional<double> waited_s;  // by this process's threads, ready and without a core
  std::optional<double> own_s;     // of cores, used by this process
  std::optional<double> busy_s;    // of cores, used by everybody
};

struct Disturbance {
  std::optional<double> waited_share, others_share;
};

class Machine {
 public:
  explicit Machine(int threads);

  // How much longer than at best a fixed piece of work takes now, on as many threads as the program has.
  double canary();
  double best_s() const { return best_s_; }
  int cores() const { return cores_; }
  Usage usage() const;
  Disturbance between(const Usage& before, const Usage& after) const;

 private:
  double canary_s() const;

  int threads_, cores_;
  std::string data_;
  double best_s_;
};

// The fields of a Measurement's `conditions`; bandwidths in GB/s, nothing where they were not measured.
edgekit::Json conditions_of(const Machine& machine, std::optional<double> read_before, std::optional<double> read_after,
                   const edgekit::Json::Members& versions);

// The fields of a Measurement's `memory`, of this process.
edgekit::Json memory_now();

// How fast so many threads read memory, in GB/s. Takes memory of its own, so it belongs into a process of its own.
double read_speed_gb_s(int threads);

// What this program prints when it is started anew with those words; throws std::runtime_error where that fails.
std::string asked_anew(const std::vector<std::string>& words);
