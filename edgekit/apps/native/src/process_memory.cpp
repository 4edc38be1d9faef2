#include "process_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#ifdef __APPLE__
#include <mach/mach.h>
#endif

namespace edgekit {
namespace {

constexpr int64_t kUnknown = -1, kKiB = 1024;

}  // namespace

#ifdef __APPLE__

int64_t private_bytes() {
  task_vm_info_data_t info;
  mach_msg_type_number_t count = TASK_VM_INFO_COUNT;
  const auto place = reinterpret_cast<task_info_t>(&info);
  if (task_info(mach_task_self(), TASK_VM_INFO, place, &count) != KERN_SUCCESS) return kUnknown;
  return static_cast<int64_t>(info.phys_footprint);
}

int64_t mapped_bytes(const std::string&) { return kUnknown; }

#else

int64_t private_bytes() {
  std::ifstream counters("/proc/self/statm");
  int64_t size = 0, resident = 0, shared = 0;
  if (!(counters >> size >> resident >> shared)) return kUnknown;
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

int64_t mapped_bytes(const std::string& folder) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(folder.c_str(), nullptr), &std::free);
  std::ifstream mappings("/proc/self/smaps");
  if (real == nullptr || !mappings) return kUnknown;
  const std::string inside = std::string(real.get()) + "/";
  std::map<std::string, int64_t> sizes;  // by the place in a file
  std::string line, place;
  while (std::getline(mappings, line)) {
    if (line.empty()) continue;
    if (line[0] < 'A' || line[0] > 'Z') {  // lines of fields begin with a capital letter, those of mappings do not
      const size_t path = line.find('/');
      std::istringstream words(line);
      std::string range, access, offset;
      words >> range >> access >> offset;
      const bool is_inside = path != std::string::npos && line.compare(path, inside.size(), inside) == 0;
      place = is_inside ? offset + " " + line.substr(path) : "";
    } else if (long long kib = 0; !place.empty() && std::sscanf(line.c_str(), "Rss: %lld", &kib) == 1) {
      sizes[place] = std::max<int64_t>(sizes[place], kib * kKiB);
    }
  }
  int64_t sum = 0;
  for (const auto& [_, bytes] : sizes) sum += bytes;
  return sum;
}

#endif

int64_t peak_resident_bytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return kUnknown;
#ifdef __APPLE__
  return usage.ru_maxrss;
#else
  return usage.ru_maxrss * kKiB;
#endif
}

}  // namespace edgekit
