#include "data/file.h"

// -------------------------------------------------------------------------------------------------
// Checksum: four lanes, so that the multiplications overlap and the hash keeps up with memory. Each
// step is a bijection of the lane for a given word, and of the word for a given lane. Any change of
// one word therefore changes the result. The two multiplications spread even the top bit of a word
// over many bits, so that a second small error does not cancel it.

static uint64_t step(uint64_t lane, uint64_t word) {
    lane += word * 0x9E3779B97F4A7C15u;  // odd
    lane = (lane << 31) | (lane >> 33);
    return lane * 0xD6E8FEB86659FD93u;  // odd
}

Checksum64::Checksum64(size_t bytes, uint64_t seed) : seed_(seed) {
    for (uint64_t i = 0; i < 4; i++) {
        lanes_[i] = step(seed + i, bytes);
    }
}

void Checksum64::add(const void* piece, size_t bytes) {
    const char* p = static_cast<const char*>(piece);
    uint64_t lanes[4];  // a copy, which the compiler keeps in registers
    uint64_t words[4];
    std::memcpy(lanes, lanes_, sizeof lanes);
    size_t left = bytes;
    for (; left >= kStep; p += kStep, left -= kStep) {
        std::memcpy(words, p, sizeof words);
        for (int i = 0; i < 4; i++) {
            lanes[i] = step(lanes[i], words[i]);
        }
    }
    uint64_t last[4] = {};  // filled up with zeros
    if (left)
        std::memcpy(last, p, left);
    for (size_t i = 0; 8 * i < left; i++) {
        lanes[i] = step(lanes[i], last[i]);
    }
    std::memcpy(lanes_, lanes, sizeof lanes);
}

uint64_t Checksum64::value() const {
    uint64_t hash = seed_;
    for (const uint64_t lane : lanes_) {
        hash = step(hash, lane);
        hash ^= hash >> 32;
    }
    return hash;
}

uint64_t checksum64(const void* data, size_t bytes, uint64_t seed) {
    Checksum64 checksum(bytes, seed);
    checksum.add(data, bytes);
    return checksum.value();
}

// -------------------------------------------------------------------------------------------------
// Reading and writing

// Moves all bytes by calls of `once`, which is pread or pwrite. Several threads move a large block,
// because one copies only about 2 GB/s to or from the memory in which the system keeps files.
template <class Once, class Byte>
static void in_pieces(const std::string& path, const char* action, Once once, int fd, Byte* p,
                      size_t bytes, size_t at) {
    constexpr size_t kThreads = 4;
    constexpr size_t kLeast = 1 << 20;
    const auto transfer = [=, &path](size_t done, size_t end) {
        while (done < end) {
            const auto n = uninterrupted([&] { return once(fd, p + done, end - done, at + done); });
            if (n < 0)
                throw file_error(path, action, errno);
            if (n == 0)
                throw Error(format("%s: truncated: expected %zu bytes at offset %zu, found %zu",
                                   path.c_str(), bytes, at, done));
            done += static_cast<size_t>(n);
        }
    };
    const size_t piece = std::max((bytes + kThreads - 1) / kThreads, kLeast);
    std::vector<std::future<void>> others;
    for (size_t begin = piece; begin < bytes; begin += piece)
        others.push_back(start_async([=] { transfer(begin, std::min(begin + piece, bytes)); }));
    transfer(0, std::min(piece, bytes));
    for (std::future<void>& other : others)
        other.get();
}

bool InputFile::is_lfs_pointer() const {
    constexpr char kFirstLine[] = "version https://git-lfs.github.com/spec/v1\n";
    constexpr size_t kLength = sizeof kFirstLine - 1;
    constexpr size_t kMost = 1024;  // by the specification
    char found[kLength];
    if (size < kLength || size > kMost)
        return false;
    const ssize_t n = uninterrupted([&] { return pread(fd, found, kLength, 0); });
    return n == ssize_t{kLength} && std::memcmp(found, kFirstLine, kLength) == 0;
}

void InputFile::read(uint64_t offset, void* out, size_t bytes) const {
    in_pieces(path, "read", pread, fd, static_cast<char*>(out), bytes, offset);
}

HeldFile::HeldFile(const std::string& path, int flags, const char* otherwise)
    : path(path),
      fd(uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0666); })),
      otherwise_(otherwise) {
    if (fd < 0)
        throw file_error(path, "open", errno);
}

void HeldFile::warn_if_replaced() {
    struct stat ours;
    struct stat named;
    if (warned_ || uninterrupted([&] { return fstat(fd, &ours); }))
        return;
    const bool found = uninterrupted([&] { return stat(path.c_str(), &named); }) == 0;
    if (found && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino)
        return;
    // Another error than these says nothing about who has the name.
    if (!found && errno != ENOENT && errno != ENOTDIR)
        return;
    warned_ = true;
    print_error(format("%s: was %s during the run; %s", path.c_str(),
                       found ? "replaced by another" : "removed", otherwise_));
}

void write_whole_file(const std::string& path, const std::vector<Block>& blocks) {
    check_regular(path);
    const std::string temporary = temporary_of(path);
    const int fd = uninterrupted(
        [&] { return open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); });
    if (fd < 0)
        throw file_error(path, "create", errno);
    try {
        size_t written = 0;
        for (const Block& block : blocks) {
            in_pieces(path, "write", pwrite, fd, static_cast<const char*>(block.data), block.bytes,
                      written);
            written += block.bytes;
        }
        // The data is synced first, then the file is renamed, then its directory is synced. After
        // any crash one whole file is there.
        if (uninterrupted([&] { return fsync(fd); }))
            throw file_error(path, "write", errno);
        if (uninterrupted([&] { return rename(temporary.c_str(), path.c_str()); }))
            throw file_error(path, "rename the finished file to", errno);
    } catch (...) {
        close(fd);
        unlink(temporary.c_str());
        throw;
    }
    close(fd);
    const size_t slash = path.rfind('/');
    const std::string dir = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    const int dir_fd =
        uninterrupted([&] { return open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (dir_fd < 0)
        throw file_error(dir, "open", errno);
    const int error = uninterrupted([&] { return fsync(dir_fd); }) ? errno : 0;
    close(dir_fd);
    // EINVAL: the file system has nothing to sync
    if (error && error != EINVAL)
        throw file_error(dir, "sync", error);
}
