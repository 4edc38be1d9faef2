#include "artifact.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "errors.h"
#include "files.h"
#include "sha256.h"

namespace edgekit {
namespace {

constexpr size_t kMostManifestBytes = 32u << 20;
constexpr int64_t kMostSignatureBytes = 8 << 20;
constexpr int64_t kMostFileBytes = int64_t{1} << 42;
constexpr int64_t kMostChunkBytes = int64_t{1} << 40;
constexpr size_t kMostFiles = 4096, kMostChunks = size_t{1} << 18;
constexpr int64_t kNewestVersion = 3, kSealedSince = 2;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kSignature = "model.sig";  // a signature of all other files, which the manifest cannot list
constexpr std::string_view kSealBegins = ",\n \"seal\": \"", kSealEnds = "\"\n}\n", kObjectEnds = "\n}\n";
constexpr size_t kHashDigits = 64;

bool is_word(char letter) {
  return (letter >= 'A' && letter <= 'Z') || (letter >= 'a' && letter <= 'z') || (letter >= '0' && letter <= '9') ||
         letter == '_';
}

bool is_hash(std::string_view text) {
  const auto is_digit = [](char letter) {
    return (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f');
  };
  return text.size() == kHashDigits && std::all_of(text.begin(), text.end(), is_digit);
}

// One to four words, each of at most 128 letters, between slashes.
bool is_name(std::string_view name) {
  if (name.find("..") != name.npos || name == kManifest || name == kSignature) return false;
  size_t words = 0, letters = 0;
  for (const char letter : name) {
    if (letter == '/') {
      if (letters == 0 || ++words == 4) return false;
      letters = 0;
    } else if (is_word(letter) || (letters > 0 && (letter == '.' || letter == '-'))) {
      if (++letters > 128) return false;
    } else {
      return false;
    }
  }
  return letters > 0;
}

// The manifest without its seal, which must be that of the bytes before it.
std::string unsealed(const std::string& data, const std::string& where) {
  const std::string fix = "; copy the artifact again, or make it again with `edgekit export`";
  const int64_t version = [&] {
    const Json whole = Json::parse(data);
    const Json* found = whole.find("version");
    if (found == nullptr || !found->is_whole()) refuse(where + ": has no version, so it is no manifest" + fix);
    return found->whole("version");
  }();
  if (version > kNewestVersion) {
    refuse(where + ": manifest version " + std::to_string(version) + ", this library reads up to " +
           std::to_string(kNewestVersion) + "; upgrade it");
  }
  const size_t size = kSealBegins.size() + kHashDigits + kSealEnds.size();
  const std::string_view whole(data);
  const std::string_view end = whole.substr(whole.size() < size ? 0 : whole.size() - size);
  const bool is_sealed = end.size() == size && end.substr(0, kSealBegins.size()) == kSealBegins &&
                         end.substr(size - kSealEnds.size()) == kSealEnds &&
                         is_hash(end.substr(kSealBegins.size(), kHashDigits));
  if (!is_sealed && version >= kSealedSince) refuse(where + ": its seal is missing or damaged" + fix);
  if (!is_sealed) return data;
  const std::string body(whole.substr(0, whole.size() - size));
  if (sha256_of(body) != end.substr(kSealBegins.size(), kHashDigits)) {
    refuse(where + ": its bytes are not those that were sealed" + fix);
  }
  return body + std::string(kObjectEnds);
}

// Refuses an object that has another member than these.
void check_members(const Json& object, const char* what, const std::set<std::string_view>& known) {
  for (const auto& [name, value] : object.members(what)) {
    if (known.count(name) == 0) refuse(std::string(what) + ": has an unknown member " + quote_short(name));
  }
}

int64_t bytes_of(const Json& part, const std::string& name, int64_t least, int64_t most) {
  const int64_t bytes = part.at("bytes").whole("bytes");
  if (bytes < least || bytes > most || !is_hash(part.at("sha256").text("sha256"))) {
    refuse(name + ": has no size or no hash");
  }
  return bytes;
}

// Chunks are what a delivery fetches; they must fill the file, whose own hash covers their bytes.
void check_chunks(const Json::List& chunks, const std::string& name, int64_t bytes) {
  if (chunks.empty()) return;
  if (chunks.size() > kMostChunks) refuse(name + ": has too many chunks");
  int64_t total = 0;
  for (const Json& chunk : chunks) {
    check_members(chunk, "chunk", {"bytes", "sha256"});
    total += bytes_of(chunk, name + ": a chunk", 1, kMostChunkBytes);
  }
  if (total != bytes) {
    refuse(name + ": its chunks have " + std::to_string(total) + " bytes and it has " + std::to_string(bytes));
  }
}

// The size of a regular file that has no other name, through which its bytes could be changed.
int64_t size_of_own(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) refuse(path + ": is missing; export or copy the artifact again");
  if (S_ISLNK(info.st_mode)) refuse(path + ": is a link; copy the artifact so that its files are its own");
  if (!S_ISREG(info.st_mode)) refuse(path + ": is not a regular file; export or copy the artifact again");
  if (info.st_nlink != 1) refuse(path + ": has several names (hard links); copy the artifact so that it has one");
  return info.st_size;
}

}  // namespace

Artifact::Artifact(const std::string& folder) : folder_(folder) {
  struct stat info;
  if (stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    refuse(folder + ": is not a directory; an artifact is the directory that `edgekit export -o` wrote");
  }
  const std::string where = path(kManifest);
  if (lstat(where.c_str(), &info) != 0) refuse(folder + ": holds no manifest.json, so it is not an artifact");
  try {
    manifest_ = Json::parse(unsealed(read_file(where, kMostManifestBytes), where));
    read_facts();
  } catch (const std::runtime_error& error) {
    const std::string why = error.what();
    if (why.rfind(folder, 0) == 0) throw;
    refuse(where + ": " + why);
  }
  check_files();
}

void Artifact::read_facts() {
  check_members(manifest_, "manifest",
                {"version", "plan", "weights_sha256", "files", "tools", "self_check", "origin"});
  const Json::Members& listed = manifest_.at("files").members("files");
  if (listed.size() > kMostFiles) refuse("it names too many files");
  for (const auto& [name, fact] : listed) {
    if (!is_name(name)) refuse("it names " + quote_short(name) + ", which cannot be a file of an artifact");
    check_members(fact, "file", {"bytes", "sha256", "chunks"});
    const int64_t bytes = bytes_of(fact, "files." + name, 0, kMostFileBytes);
    for (const auto& [member, value] : fact.members("file")) {
      if (member == "chunks") check_chunks(value.list("chunks"), "files." + name, bytes);
    }
    files_.emplace(name, FileFact{bytes, fact.at("sha256").text("sha256")});
  }
}

void Artifact::check_files() const {
  namespace fs = std::filesystem;
  for (const auto& [name, fact] : files_) {
    for (size_t slash = name.find('/'); slash != name.npos; slash = name.find('/', slash + 1)) {
      struct stat info;
      if (lstat(path(name.substr(0, slash)).c_str(), &info) == 0 && S_ISLNK(info.st_mode)) {
        refuse(path(name) + ": is behind a link; an artifact may hold only regular files");
      }
    }
    const int64_t size = size_of_own(path(name));
    if (size != fact.bytes) {
      refuse(path(name) + ": has " + std::to_string(size) + " bytes, the manifest says " + std::to_string(fact.bytes) +
             "; copy it again");
    }
  }
  size_of_own(path(kManifest));
  std::error_code error;
  size_t found = 0;
  fs::recursive_directory_iterator each(folder_, error);
  for (; !error && each != fs::recursive_directory_iterator(); each.increment(error)) {
    const std::string name = each->path().lexically_relative(folder_).generic_string();
    const auto status = each->symlink_status(error);
    if (!fs::is_regular_file(status) && !fs::is_directory(status)) {
      refuse(path(name) + ": an artifact may hold only regular files");
    }
    if (fs::is_directory(status)) continue;
    if (++found > kMostFiles + 2) refuse(folder_ + ": holds too many files");
    if (name == kSignature && size_of_own(path(name)) > kMostSignatureBytes) {
      refuse(path(name) + ": is too large for a signature; copy the artifact again");
    }
    if (name != kManifest && name != kSignature && !has(name)) {
      refuse(path(name) + ": is not in the manifest; an artifact is never written again: remove this file");
    }
  }
  if (error) refuse(folder_ + ": cannot be read: " + error.message() + "; check the path");
  for (const auto& [name, fact] : files_) {
    if (sha256_of_file(path(name)) != fact.sha256) {
      refuse(path(name) + ": its bytes are not those that were sealed; export it again");
    }
  }
}

const Artifact::FileFact& Artifact::fact(const std::string& name) const {
  const auto found = files_.find(name);
  if (found == files_.end()) refuse(folder_ + ": holds no " + name + "; export it again");
  return found->second;
}

std::string Artifact::read(const std::string& name, size_t limit) const {
  const FileFact& stated = fact(name);
  std::string bytes = read_file(path(name), limit);
  if (sha256_of(bytes) != stated.sha256) refuse(path(name) + ": was changed while it was opened; open it again");
  return bytes;
}

}  // namespace edgekit
