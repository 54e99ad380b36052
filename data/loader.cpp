// Batches from token shards or plain text: where each window of an epoch lies, and reading it.
//
// An epoch is a permutation of the shards and, within each, a permutation of its windows. No list of windows is stored,
// because the permutation is a keyed function of the index (below). Any position of any epoch is found directly,
// restore costs no replay, and memory does not grow with the data. Shards are visited one after the other, so that one
// file is open at a time and reads stay within it.
#include "data/loader.h"

#include <glob.h>

#include <climits>

#include "data/file.h"
#include "data/random.h"
#include "data/tokenizer.h"

namespace {

constexpr int32_t kShardMagic = 20240520, kModelMagic = 20240326;
constexpr uint64_t kHeaderBytes = 256 * sizeof(int32_t);

uint64_t mix(uint64_t x) {
    return mix64(x + kGolden);
}

// A permutation of 0..n-1 chosen by `key`, evaluated at `index`. A Feistel network permutes 0..4^k-1, with the least
// 4^k that is n or more. It is a permutation because each round can be undone by running it backwards, whatever its
// round function. Results ≥ n are fed in again until one is below n. That walk stays on one cycle of the network, which
// contains `index` itself, so it ends and no two indices meet.
uint64_t permute(uint64_t index, uint64_t n, uint64_t key) {
    int half_bits = 1;
    while (half_bits < 32 && (uint64_t{1} << (2 * half_bits)) < n) half_bits++;
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits, right = index & mask;
        for (uint64_t round = 0; round < 6; round++) {
            const uint64_t next = left ^ (mix(key ^ mix(right << 3 | round)) & mask);
            left = right;
            right = next;
        }
        index = left << half_bits | right;
    } while (index >= n);
    return index;
}

std::string human(uint64_t n) {
    const double x = static_cast<double>(n);
    return x >= 1e9 ? format("%.1f G", x / 1e9) : x >= 1e6 ? format("%.1f M", x / 1e6) : format("%zu", n);
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

struct Shard {
    std::string path;
    uint64_t tokens, file_bytes;
};

std::vector<std::string> matching_files(const std::string& pattern) {
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) {  // an existing name means that file, even if it has brackets
        if (S_ISDIR(info.st_mode))
            throw Error(pattern + ": is a directory; give a file or a quoted pattern such as '" + pattern + "/*.bin'");
        return {pattern};
    }
    glob_t found;
    const int status = glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
    std::vector<std::string> paths;
    for (size_t i = 0; status == 0 && i < found.gl_pathc; i++) paths.push_back(found.gl_pathv[i]);  // sorted
    globfree(&found);
    if (status == GLOB_ABORTED)
        throw Error(pattern + ": a directory of this pattern is missing or cannot be read; check the path and its "
                              "permissions, or make token shards with data/prepare.py");
    if (paths.empty())
        throw Error(pattern + ": no such file, and no file matches it as a pattern; check the path, or make token shards "
                              "with data/prepare.py");
    return paths;
}

// Checks the header of a shard, or sets is_text for a text file. A text's tokens are <|endoftext|> and then its bytes.
Shard inspect(const std::string& path, bool only_file, bool& is_text) {
    const InputFile file(path);
    int32_t header[3] = {};  // magic, version, count
    file.read(0, header, std::min<uint64_t>(sizeof header, file.size));
    const char* name = path.c_str();
    is_text = header[0] != kShardMagic;
    if (is_text) {
        if (ends_with(path, ".bin") || header[0] == kModelMagic || !only_file)
            throw Error(format("%s: wrong magic at offset 0: expected %d, found %d; %s", name, kShardMagic, header[0],
                               header[0] == kModelMagic ? "this is a model checkpoint, give token shards as data"
                               : only_file
                                   ? "give llm.c token shards, or rename a text file so that it does not end in .bin"
                                   : "a pattern takes token shards only, a text file has to be given alone"));
        return {path, file.size + 1, file.size};
    }
    if (file.size < kHeaderBytes)
        throw Error(format("%s: truncated: expected a header of %zu bytes, found a file of %zu; get the file again",
                           name, kHeaderBytes, file.size));
    if (header[1] != 1)
        throw Error(
            format("%s: wrong version at offset 4: expected 1, found %d; write the shard anew with this version", name,
                   header[1]));
    if (header[2] < 0)
        throw Error(
            format("%s: damaged header: number of tokens at offset 8: expected 0..%d, found %d; get the file again",
                   name, INT_MAX, header[2]));
    const uint64_t tokens = static_cast<uint64_t>(header[2]);
    const uint64_t expected = kHeaderBytes + tokens * sizeof(uint16_t);
    if (file.size != expected)
        throw Error(format("%s: %s: the header says %zu tokens, expected %zu bytes, found %zu; get the file again",
                           name, file.size < expected ? "truncated" : "too long", tokens, expected, file.size));
    return {path, tokens, file.size};
}

}  // namespace

struct Loader::Impl {
    std::vector<Shard> shards;
    bool is_text = false;
    uint64_t B, T, seed;
    int vocab, end_of_text;
    bool shuffle;
    uint64_t tokens = 0, windows = 0;  // in all shards
    std::string description;

    LoaderState state;
    std::vector<size_t> order;           // shards in the order of this epoch
    std::vector<uint64_t> first_window;  // of order[i] in this epoch, and behind the last the number of all windows
    std::unique_ptr<InputFile> file;     // the shard in use
    std::vector<unsigned char> raw;      // bytes of one window
    std::vector<int> window_tokens;      // T+1

    uint64_t windows_in(const Shard& shard) const { return shard.tokens > 0 ? (shard.tokens - 1) / T : 0; }
    uint64_t key(uint64_t epoch, uint64_t what) const { return mix(mix(seed ^ mix(epoch)) ^ what); }

    void begin_epoch(uint64_t epoch) {
        order.resize(shards.size());
        first_window.assign(1, 0);
        for (size_t i = 0; i < shards.size(); i++) {
            order[i] = shuffle ? permute(i, shards.size(), key(epoch, shards.size())) : i;
            first_window.push_back(first_window.back() + windows_in(shards[order[i]]));
        }
    }

    // Reads the window at state.window into window_tokens.
    void read_window() {
        const size_t place = static_cast<size_t>(
            std::upper_bound(first_window.begin(), first_window.end(), state.window) - first_window.begin() - 1);
        const size_t index = order[place];
        const Shard& shard = shards[index];
        uint64_t local = state.window - first_window[place];
        if (shuffle) local = permute(local, windows_in(shard), key(state.epoch, index));
        if (!file || file->path != shard.path) file = std::make_unique<InputFile>(shard.path);

        const uint64_t begin = local * T;  // token of the shard
        const size_t count = static_cast<size_t>(T) + 1;
        if (is_text) {
            const size_t head = begin == 0;  // token 0 is <|endoftext|>, token i is byte i-1
            file->read(begin - 1 + head, raw.data(), count - head);
            if (head) window_tokens[0] = end_of_text;
            for (size_t i = head; i < count; i++) window_tokens[i] = byte_to_token(raw[i - head]);
        } else {
            file->read(kHeaderBytes + begin * sizeof(uint16_t), raw.data(), count * sizeof(uint16_t));
            for (size_t i = 0; i < count; i++) {
                const int token = raw[2 * i] | raw[2 * i + 1] << 8;
                window_tokens[i] = token == kEndOfText ? end_of_text : token;
            }
        }
        for (size_t i = 0; i < count; i++)
            if (window_tokens[i] >= vocab)  // never in text
                throw Error(
                    format("%s: token at offset %zu: expected less than the vocabulary of %d, found %d; train a "
                           "model with a larger vocabulary on this data",
                           shard.path.c_str(), kHeaderBytes + (begin + i) * sizeof(uint16_t), vocab, window_tokens[i]));
    }

    void advance() {
        if (++state.window < windows) return;
        state.window = 0;
        begin_epoch(++state.epoch);
    }
};

Loader::Loader(const std::string& pattern, int B, int T, int vocab, bool shuffle, uint64_t seed)
    : impl_(std::make_unique<Impl>()) {
    Impl& m = *impl_;
    if (B < 1 || T < 1)
        throw Error(format("%s: cannot make batches of B=%d, T=%d; both start at 1", pattern.c_str(), B, T));
    m.B = static_cast<uint64_t>(B), m.T = static_cast<uint64_t>(T), m.seed = seed, m.shuffle = shuffle;
    m.vocab = vocab, m.end_of_text = vocab == kByteVocab ? kByteEndOfText : kEndOfText;
    m.raw.resize((m.T + 1) * sizeof(uint16_t));
    m.window_tokens.resize(m.T + 1);

    const std::vector<std::string> paths = matching_files(pattern);
    for (const std::string& path : paths) {
        m.shards.push_back(inspect(path, paths.size() == 1, m.is_text));
        m.tokens += m.shards.back().tokens;
        m.windows += m.windows_in(m.shards.back());
    }
    if (m.windows < m.B)
        throw Error(
            format("%s: too little data: expected B·T + 1 = %zu tokens, or %d windows of %d, found %zu tokens in %zu "
                   "%s, %zu windows; choose a smaller B or T",
                   pattern.c_str(), m.B * m.T + 1, B, T, m.tokens, paths.size(), paths.size() == 1 ? "file" : "files",
                   m.windows));
    if (m.is_text && m.end_of_text >= vocab)
        throw Error(
            format("%s: text needs a vocabulary of %d (bytes) or at least %d (GPT-2), found %d; give token shards",
                   pattern.c_str(), kByteVocab, kEndOfText + 1, vocab));
    m.description =
        m.is_text ? "text file, " : format("%zu %s, ", m.shards.size(), m.shards.size() == 1 ? "shard" : "shards");
    m.description += human(m.tokens) + " tokens";
    m.begin_epoch(0);
}

Loader::~Loader() = default;

void Loader::next(int* inputs, int* targets) {
    Impl& m = *impl_;
    for (uint64_t b = 0; b < m.B; b++) {
        m.read_window();
        std::copy_n(m.window_tokens.data(), m.T, inputs + b * m.T);
        std::copy_n(m.window_tokens.data() + 1, m.T, targets + b * m.T);
        m.advance();
    }
    m.state.batches++;
}

void Loader::skip(uint64_t batches) {
    Impl& m = *impl_;
    for (uint64_t i = 0; i < batches * m.B; i++) m.advance();
    m.state.batches += batches;
}

void Loader::reset() {
    restore({});
}

LoaderState Loader::state() const {
    return impl_->state;
}

void Loader::restore(const LoaderState& state) {
    Impl& m = *impl_;
    if (state.window >= m.windows)
        throw Error(
            format("%s: cannot go on at window %zu: an epoch has %zu; resume with the data the checkpoint was made on",
                   m.description.c_str(), state.window, m.windows));
    m.state = state;
    m.begin_epoch(state.epoch);
}

uint64_t Loader::num_tokens() const {
    return impl_->tokens;
}
uint64_t Loader::batches_per_epoch() const {
    return impl_->windows / impl_->B;
}
const std::string& Loader::description() const {
    return impl_->description;
}

// Hashes blocks of 4 KiB spread over each file, its first and its last among them. They are about 256 in all and at
// least three a file. A file no larger than its share is hashed whole. Names do not count, because moved data is the
// same data.
uint64_t Loader::identity() const {
    constexpr uint64_t kBlockBytes = 4096, kBlocks = 256;
    const uint64_t blocks = std::max<uint64_t>(3, kBlocks / impl_->shards.size());
    std::vector<char> block(kBlockBytes);
    uint64_t hash = impl_->shards.size();
    for (const Shard& shard : impl_->shards) {
        const InputFile input(shard.path);
        hash = checksum64(&shard.file_bytes, sizeof shard.file_bytes, hash);
        const bool whole = shard.file_bytes <= blocks * kBlockBytes;
        const uint64_t count = whole ? (shard.file_bytes + kBlockBytes - 1) / kBlockBytes : blocks;
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t offset = whole ? i * kBlockBytes : (shard.file_bytes - kBlockBytes) * i / (blocks - 1);
            const size_t bytes = static_cast<size_t>(std::min(kBlockBytes, shard.file_bytes - offset));
            input.read(offset, block.data(), bytes);
            hash = checksum64(block.data(), bytes, hash);
        }
    }
    return hash;
}
