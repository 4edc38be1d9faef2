// The memory of this process, as the system counts it; -1 where it does not.
#pragma once

#include <cstdint>
#include <string>

namespace edgekit {

int64_t private_bytes();  // without clean pages of files; on Apple's systems the footprint by which an app is ended
int64_t peak_resident_bytes();

// Resident bytes of mapped files in a folder. A part of a file that is mapped twice counts once.
int64_t mapped_bytes(const std::string& folder);

}  // namespace edgekit
