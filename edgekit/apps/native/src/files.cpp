#include "files.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "errors.h"

namespace edgekit {

std::string read_file(const std::string& path, size_t limit) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) refuse(path + ": cannot be read: " + std::strerror(errno) + "; check the path");
  if (!S_ISREG(info.st_mode)) refuse(path + ": not a regular file");
  if (static_cast<unsigned long long>(info.st_size) > limit) {
    refuse(path + ": has " + std::to_string(info.st_size) + " bytes, more than the " + std::to_string(limit) +
           " allowed");
  }
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) refuse(path + ": cannot be read: " + std::strerror(errno) + "; check the path");
  std::string bytes(static_cast<size_t>(info.st_size), '\0');
  if (std::fread(bytes.data(), 1, bytes.size(), file.get()) != bytes.size()) {
    refuse(path + ": is shorter than it was; copy it again");
  }
  return bytes;
}

}  // namespace edgekit
