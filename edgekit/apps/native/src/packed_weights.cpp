#include "packed_weights.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <system_error>
#include <vector>

#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include "errors.h"
#include "files.h"
#include "graph_audit.h"
#include "narrow_graph.h"
#include "onnx_engine.h"
#include "onnx_fields.h"
#include "protobuf.h"
#include "sha256.h"

namespace edgekit {
namespace {

namespace fs = std::filesystem;
using namespace onnx;

constexpr const char* kStamp = "packed.txt";  // the key, then the size and name of each file; written last
constexpr const char* kLayout = "1";          // raise it whenever the form of the folder changes
constexpr size_t kMostStampBytes = 1u << 20, kMostPackedGraphBytes = 512u << 20;
constexpr uint64_t kAlignment = 64;   // of packed memory, on which its layout depends
constexpr int64_t kPackedShare = 3;   // bytes of packed files by those of the weights, at most
constexpr TokenId kProbe[] = {0, 1, 2};

// What kernels choose the layout of packed weights by: not by the kind of a core, since cores that sleep are not listed.
std::string processor() {
#ifdef __APPLE__
  std::string found;
  for (const char* name : {"hw.cputype", "hw.cpusubtype", "hw.cpufamily"}) {
    int32_t value = 0;
    size_t size = sizeof value;
    sysctlbyname(name, &value, &size, nullptr, 0);
    found += std::to_string(value) + " ";
  }
  return found;
#else
  std::set<std::string> lines;
  std::ifstream cores("/proc/cpuinfo");
  for (std::string line; std::getline(cores, line);) {
    for (const char* name : {"flags", "Features"}) {
      if (line.rfind(name, 0) == 0) lines.insert(line);
    }
  }
  std::string found;
  for (const std::string& line : lines) found += line + "\n";
  return found;
#endif
}

std::string key_of(const Artifact& artifact, const Plan& plan, const std::string& version) {
  std::string inputs = std::string(kLayout) + "\n" + version + "\n" + processor();
  for (const std::string& name : graph_names(plan)) inputs += artifact.hash_of(name) + "\n";
  return sha256_of(inputs + artifact.hash_of(kWeightsFile));
}

std::string data_file(const std::string& graph) { return fs::path(graph).stem().string() + ".bin"; }

// Whether the folder has a stamp with this key, and the files that it names in their sizes.
bool is_packed(const std::string& folder, const std::string& key) {
  std::error_code error;
  const fs::path stamp = fs::path(folder) / kStamp;
  if (!fs::is_regular_file(stamp, error)) return false;
  std::istringstream lines(read_file(stamp.string(), kMostStampBytes));
  std::string found, name;
  if (!(lines >> found) || found != key) return false;
  for (uintmax_t size = 0; lines >> size >> name;) {
    if (fs::file_size(fs::path(folder) / name, error) != size || error) return false;
  }
  return true;
}

// Removes packed weights of before; a folder with anything else is not ours.
void remove_packed(const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(folder, error))) return;
  std::vector<fs::path> found;
  for (const auto& each : fs::directory_iterator(folder, error)) {
    const std::string kind = each.path().extension().string();
    const bool is_ours = each.path().filename() == kStamp || kind == ".onnx" || kind == ".bin" || kind == ".aligned";
    if (!is_ours || !each.is_regular_file(error)) {
      refuse(folder.string() + ": holds " + quote_short(each.path().filename().string()) +
             ", which is no packed weight; name a folder that only packed weights use");
    }
    found.push_back(each.path());
  }
  if (error) refuse(folder.string() + ": cannot be read as a folder: " + error.message());
  for (const fs::path& each : found) fs::remove(each, error);
  if (!fs::remove(folder, error)) refuse(folder.string() + ": cannot be removed: " + error.message());
}

void refuse_cut_short(const std::string& where) {
  refuse(where + ": the packed weights are not whole; is the disk full?");
}

// A graph's data file while it is written again, each piece at a multiple of 64 bytes.
class DataFile {
 public:
  explicit DataFile(const fs::path& path)
      : path_(path), made_(path.parent_path() / (path.stem().string() + ".aligned")), from_(path, std::ios::binary),
        to_(made_, std::ios::binary) {}

  std::string move(uint64_t offset, uint64_t length) {
    constexpr size_t kBlock = 1u << 20;
    static const std::string zeros(kAlignment, '\0');
    to_.write(zeros.data(), static_cast<std::streamsize>((kAlignment - size_ % kAlignment) % kAlignment));
    size_ += (kAlignment - size_ % kAlignment) % kAlignment;
    const uint64_t start = size_;
    std::string block(std::min<uint64_t>(kBlock, length), '\0');
    from_.seekg(static_cast<std::streamoff>(offset));
    for (uint64_t left = length; left > 0;) {
      const auto count = static_cast<std::streamsize>(std::min<uint64_t>(kBlock, left));
      if (!from_.read(block.data(), count) || !to_.write(block.data(), count)) refuse_cut_short(path_.string());
      left -= static_cast<uint64_t>(count);
    }
    size_ += length;
    return std::to_string(start);
  }

  void replace() {
    to_.close();
    if (!to_) refuse_cut_short(path_.string());
    fs::rename(made_, path_);
  }

 private:
  const fs::path path_, made_;
  std::ifstream from_;
  std::ofstream to_;
  uint64_t size_ = 0;
};

// ONNX Runtime writes a tensor's packed pieces as "NAME|OFFSET;LENGTH;HASH|...", one after another.
std::string moved_pieces(const std::string& value, DataFile& file) {
  std::istringstream parts(value);
  std::string made, part;
  std::getline(parts, made, '|');
  while (std::getline(parts, part, '|')) {
    const size_t first = part.find(';');
    size_t read = 0;
    const uint64_t length = first == part.npos ? 0 : std::stoull(part.substr(first + 1), &read);
    if (read == 0) refuse("a packed piece has no place: " + quote_short(value));
    made += "|" + file.move(std::stoull(part), length) + part.substr(first);
  }
  return made;
}

std::string moved_tensor(std::string_view tensor, DataFile& file) {
  std::map<std::string, std::string> entries;
  for (const ProtobufField& each : protobuf_fields(tensor)) {
    if (each.number == kTensorExternal) entries[text_of(each.content, kEntryKey)] = text_of(each.content, kEntryValue);
  }
  if (entries.count("offset") == 0 || entries.count("length") == 0) return std::string(tensor);
  entries["offset"] = file.move(std::stoull(entries["offset"]), std::stoull(entries["length"]));
  for (auto& [key, value] : entries) {
    if (key.rfind("prepacked", 0) == 0) value = moved_pieces(value, file);
  }
  return replaced_in(tensor, kTensorExternal, [&](std::string_view entry) {
    std::string made;
    const std::string key = text_of(entry, kEntryKey);
    add_bytes(made, kEntryKey, key);
    add_bytes(made, kEntryValue, entries[key]);
    return made;
  });
}

// ONNX Runtime writes pieces without gaps, and packed weights that are mapped at another alignment than they were made
// for are read wrongly.
void align(const fs::path& graph) {
  DataFile file(graph.parent_path() / data_file(graph.filename().string()));
  const std::string made = replaced_in(
      read_file(graph.string(), kMostPackedGraphBytes), kModelGraph, [&](std::string_view body) {
        return replaced_in(body, kGraphTensor,
                           [&](std::string_view tensor) { return moved_tensor(tensor, file); });
      });
  file.replace();
  std::ofstream written(graph, std::ios::binary);
  if (!written.write(made.data(), static_cast<std::streamsize>(made.size())).flush()) refuse_cut_short(graph.string());
}

std::vector<float> probe(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                         const std::string& packed) {
  OnnxEngine engine(artifact, plan, library, threads, false, packed);
  const float* logits = engine.feed({std::begin(kProbe), std::end(kProbe)}, 1);
  return {logits, logits + plan.vocabulary};
}

// The bytes of the file, or of the entries of a folder, are on the disk when this returns.
void synchronise(const fs::path& path) {
  const int handle = ::open(path.c_str(), O_RDONLY);
  const bool is_kept = handle >= 0 && ::fsync(handle) == 0;
  const int reason = errno;
  if (handle >= 0) ::close(handle);
  if (!is_kept) refuse(path.string() + ": cannot be kept: " + std::strerror(reason));
}

void make(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
          const std::shared_ptr<OnnxRuntime>& runtime, const fs::path& folder) {
  const std::vector<std::string> names = graph_names(plan);
  for (size_t index = 0; index < names.size(); ++index) {
    const std::string saved = (folder / names[index]).string();
    const std::string graph = with_float_cache(read_graph(artifact, plan, index));
    Session(runtime, graph, artifact.folder(), threads, {saved, data_file(names[index])});
    align(saved);
  }
  std::string stamp = key_of(artifact, plan, runtime->version()) + "\n";
  for (const auto& each : fs::directory_iterator(folder)) {
    synchronise(each.path());
    stamp += std::to_string(each.file_size()) + " " + each.path().filename().string() + "\n";
  }
  std::ofstream(folder / kStamp) << stamp;
  synchronise(folder / kStamp);
  if (probe(artifact, plan, library, threads, "") != probe(artifact, plan, library, threads, folder.string()))
    refuse(folder.string() + ": the model gives other logits once its weights are packed; open it without");
}

}  // namespace

void pack_weights(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                  const std::string& folder) {
  const auto runtime = OnnxRuntime::load(library);
  if (is_packed(folder, key_of(artifact, plan, runtime->version()))) return;
  try {
    fs::path place = fs::absolute(folder).lexically_normal();
    if (!place.has_filename()) place = place.parent_path();  // it was given with a slash at its end
    const fs::path part = place.string() + ".part";
    remove_packed(place);
    remove_packed(part);  // of a process that was killed
    fs::create_directories(part);
    const auto needed = static_cast<uintmax_t>(kPackedShare * artifact.bytes(kWeightsFile));
    const uintmax_t free = fs::space(part).available;
    if (free < needed) {
      fs::remove(part);
      refuse(folder + ": packed weights need " + std::to_string(needed) + " bytes there, " + std::to_string(free) +
             " are free");
    }
    try {
      make(artifact, plan, library, threads, runtime, part);
      fs::rename(part, place);
    } catch (...) {
      remove_packed(part);
      throw;
    }
    synchronise(place.parent_path());
  } catch (const fs::filesystem_error& error) {
    refuse(folder + ": cannot be written: " + error.code().message());
  }
}

void check_packed(const Artifact& artifact, const Plan& plan, const std::string& version, const std::string& folder) {
  if (!is_packed(folder, key_of(artifact, plan, version))) {
    refuse(folder + ": has no packed weights of this artifact for this processor and onnxruntime " + version +
           "; make them with edgekit_pack");
  }
}

}  // namespace edgekit
