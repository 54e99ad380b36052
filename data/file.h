// Reading files at 64-bit offsets, writing them atomically, and checksums.
#pragma once
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/threads.h"

// llm.c's files start with a header of 256 int32, the first of which is a magic number.
constexpr size_t kHeaderInts = 256;
constexpr size_t kHeaderBytes = kHeaderInts * sizeof(int32_t);
constexpr int32_t kModelMagic = 20240326;
constexpr int32_t kShardMagic = 20240520;

// Copies a file into this object file, between NAME_begin and NAME_end, so that the program is a
// single file and runs from any directory. The path is relative to the repository root, where make
// compiles.
#define EMBED(name, path)                               \
    extern "C" const char name##_begin[], name##_end[]; \
    asm(".pushsection .rodata\n" #name "_begin: .incbin \"" path "\"\n" #name "_end: .popsection")

// -------------------------------------------------------------------------------------------------
// System calls

// An Error with advice for some values of errno, such as "out/log.jsonl: cannot write: No space
// left on device; free some space or choose another directory".
Error file_error(const std::string& path, const char* action, int error);

// Repeats a system call until no signal interrupts it.
template <class F>
auto uninterrupted(F call) {
    auto result = call();
    while (result < 0 && errno == EINTR) {
        result = call();
    }
    return result;
}

// Throws Error if the path exists and is not a regular file. Call it before opening: opening a pipe
// may block, and a device may have no end.
void check_regular(const std::string& path);

// -------------------------------------------------------------------------------------------------
// Files

struct InputFile {
    explicit InputFile(const std::string& path);
    ~InputFile() { close(fd); }
    InputFile(const InputFile&) = delete;
    InputFile& operator=(const InputFile&) = delete;

    void read(uint64_t offset, void* out, size_t bytes) const;
    std::string read_from(uint64_t offset) const;  // to the end of the file
    std::string read_all() const { return read_from(0); }

    // Throws Error with this description of the damage if a check of the content has failed.
    void require(bool ok, const std::string& damage) const;

    const std::string path;
    uint64_t size;
    int fd;

  private:
    bool is_lfs_pointer() const;
};

// A file or directory that stays open during a run, while its name may be removed or given to
// another file.
class HeldFile {
  public:
    // `consequence` is the end of the warning.
    HeldFile(const std::string& path, int flags, const char* consequence);
    ~HeldFile() { close(fd); }
    HeldFile(const HeldFile&) = delete;
    HeldFile& operator=(const HeldFile&) = delete;

    void warn_if_replaced();  // on stderr, once

    const std::string path;
    const int fd;

  private:
    const char* const consequence_;
    bool warned_ = false;
};

struct Block {
    const void* data;
    size_t bytes;
};

// Writes a file atomically, as the concatenation of the blocks. If that fails, it throws Error and
// leaves no temporary file behind. The path then has what it had before or, if only the sync of its
// directory has failed, the new file.
void write_whole_file(const std::string& path, const std::vector<Block>& blocks);

// The name of a file while write_whole_file() is writing it.
std::string temporary_path(const std::string& path);

// -------------------------------------------------------------------------------------------------
// Checksums

// A fast 64-bit hash, the same on every machine.
uint64_t checksum64(const void* data, size_t bytes, uint64_t seed = 0);

// The same hash of data that is given piece by piece.
class Checksum64 {
    static constexpr size_t kLanes = 4;

  public:
    // The length in bytes of every piece but the last must be a multiple of this.
    static constexpr size_t kStep = kLanes * sizeof(uint64_t);

    // `total_bytes` is the length of all pieces together.
    explicit Checksum64(size_t total_bytes, uint64_t seed = 0);
    void add(const void* piece, size_t bytes);
    uint64_t value() const;

  private:
    uint64_t seed_;
    uint64_t lanes_[kLanes];
};
