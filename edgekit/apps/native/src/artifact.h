// A sealed artifact: its manifest, and the check that its files are the ones the manifest names.
#pragma once

#include <map>
#include <string>

#include "json.h"

namespace edgekit {

class Artifact {
 public:
  // Checks the seal of the manifest, and the names, sizes and hashes of all files. Throws std::runtime_error.
  explicit Artifact(const std::string& folder);

  const Json& plan() const { return manifest_.at("plan"); }
  bool has(const std::string& name) const { return files_.count(name) != 0; }
  // The size of a file; refuses one that is not in the manifest.
  uint64_t bytes(const std::string& name) const { return static_cast<uint64_t>(fact(name).bytes); }
  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  const std::string& hash_of(const std::string& name) const { return fact(name).sha256; }

  // The bytes of a file, which are compared with its hash once more: it may have been replaced since it was opened.
  std::string read(const std::string& name, size_t limit) const;

 private:
  struct FileFact {
    int64_t bytes;
    std::string sha256;
  };
  const FileFact& fact(const std::string& name) const;  // throws std::runtime_error
  void read_facts();
  void check_files() const;

  std::string folder_;
  Json manifest_;
  std::map<std::string, FileFact> files_;
};

}  // namespace edgekit
