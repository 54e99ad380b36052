// Batches from token shards or plain text: where each window of an epoch lies, and reading it.
//
// An epoch is a permutation of the shards and, within each, a permutation of its windows. No list
// of windows is stored, because the permutation is a keyed function of the index (below). Any
// position of any epoch is found directly, restore costs no replay, and memory does not grow with
// the data. Shards are visited one after the other, so that one file is open at a time and reads
// stay within it.
#include "data/loader.h"

#include <glob.h>

#include <climits>

#include "data/text.h"

namespace {

// A permutation of 0..n-1 chosen by `key`, evaluated at `index`. A Feistel network permutes
// 0..4^k-1, with the least 4^k that is n or more. It is a permutation because each round can be
// undone by running it backwards, whatever its round function. Results ≥ n are fed in again until
// one is below n. That walk stays on one cycle of the network, which contains `index` itself, so it
// ends and no two indices meet.
uint64_t permute(uint64_t index, uint64_t n, uint64_t key) {
    int half_bits = 1;
    while (half_bits < 32 && (uint64_t{1} << (2 * half_bits)) < n)
        half_bits++;
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    do {
        uint64_t left = index >> half_bits;
        uint64_t right = index & mask;
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
    return x >= 1e9   ? format("%.1f G", x / 1e9)
           : x >= 1e6 ? format("%.1f M", x / 1e6)
                      : format("%zu", n);
}

std::vector<std::string> matching_files(const std::string& pattern) {
    struct stat info;
    // an existing name means that file, even if it has brackets
    if (stat(pattern.c_str(), &info) == 0) {
        if (S_ISDIR(info.st_mode))
            throw Error(pattern + ": is a directory; give a file or a quoted pattern such as " +
                        shell_quoted(glob_escaped(pattern) + "/train_*.bin"));
        return {pattern};
    }
    glob_t found;
    const int status = glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
    std::vector<std::string> paths;
    // sorted
    for (size_t i = 0; status == 0 && i < found.gl_pathc; i++)
        paths.push_back(found.gl_pathv[i]);
    globfree(&found);
    if (paths.empty())
        throw Error(pattern +
                    (status == GLOB_ABORTED
                         ? ": a directory of this pattern is missing or cannot be read; check the "
                           "path and its permissions"
                         : ": no such file, and no file matches it as a pattern; check the path") +
                    ", or make token shards with data/prepare.py");
    return paths;
}

}  // namespace

int vocabulary_of(const std::string& pattern, bool encoded) {
    if (encoded)
        return kEndOfText + 1;
    constexpr uint64_t kAtOnce = 1 << 20;  // tokens
    const auto is_byte = [](int token) { return token < kByteEndOfText || token == kEndOfText; };
    for (const std::string& path : matching_files(pattern)) {
        const InputFile file(path);
        int32_t magic = 0;
        file.read(0, &magic, std::min<uint64_t>(sizeof magic, file.size));
        if (magic != kShardMagic)
            continue;
        std::vector<uint16_t> tokens(kAtOnce);
        for (uint64_t at = kHeaderBytes; at + sizeof(uint16_t) <= file.size;
             at += tokens.size() * sizeof(uint16_t)) {
            tokens.resize(std::min(kAtOnce, (file.size - at) / sizeof(uint16_t)));
            file.read(at, tokens.data(), tokens.size() * sizeof(uint16_t));
            if (!std::all_of(tokens.begin(), tokens.end(), is_byte))
                return kEndOfText + 1;
        }
    }
    return kByteVocab;
}

void Loader::check_end_of_text(const std::string& name) const {
    if (end_of_text_ >= vocab_)
        throw Error(
            format("%s: text needs a vocabulary of %d (bytes) or at least %d (GPT-2), found %d; "
                   "give token shards",
                   name.c_str(), kByteVocab, kEndOfText + 1, vocab_));
}

// Every document's tokens behind <|endoftext|>.
Loader::Shard Loader::read_text(const InputFile& file, const Tokenizer& tokenizer) {
    check_end_of_text(file.path);
    const std::string text = file.rest();
    check_is_text(text, file.path);
    is_text_ = true;
    is_bpe_ = tokenizer.has_pairs_for(vocab_);
    if (is_bpe_)
        check_utf8(text, file.path);
    for (const std::string& document : documents(text)) {
        const std::vector<int> tokens = tokenizer.encode(document, vocab_, file.path);
        text_.push_back(static_cast<uint16_t>(end_of_text_));
        text_.insert(text_.end(), tokens.begin(), tokens.end());
    }
    return {file.path, text_.size(), file.size};
}

// Checks the header of a shard, or finds that it is a text file.
Loader::Shard Loader::inspect(const std::string& path, bool only_file, const Tokenizer& tokenizer) {
    const InputFile file(path);
    int32_t header[3] = {};  // magic, version, count
    file.read(0, header, std::min<uint64_t>(sizeof header, file.size));
    if (header[0] != kShardMagic) {
        const bool binary = path.size() >= 4 && path.compare(path.size() - 4, 4, ".bin") == 0;
        if (binary || header[0] == kModelMagic || !only_file)
            throw Error(
                path +
                format(": wrong magic at offset 0: expected %d, found %d; ", kShardMagic,
                       header[0]) +
                (header[0] == kModelMagic ? "this is a model checkpoint, give token shards as data"
                 : only_file
                     ? "give llm.c token shards, or rename a text file so that it "
                       "does not end in .bin"
                     : "a pattern takes token shards only, a text file has to be given alone"));
        return read_text(file, tokenizer);
    }
    file.require(file.size >= kHeaderBytes,
                 format("truncated: expected a header of %zu bytes, found a file of %zu",
                        kHeaderBytes, file.size));
    if (header[1] != 1)
        throw Error(path + format(": wrong version at offset 4: expected 1, found %d", header[1]) +
                    "; write the shard anew with this version");
    file.require(header[2] >= 0,
                 format("damaged header: number of tokens at offset 8: expected 0..%d, found %d",
                        INT_MAX, header[2]));
    const uint64_t tokens = static_cast<uint64_t>(header[2]);
    const uint64_t expected = kHeaderBytes + tokens * sizeof(uint16_t);
    file.require(
        file.size == expected,
        format("%s: the header says %zu tokens, expected %zu bytes, found %zu",
               file.size < expected ? "truncated" : "too long", tokens, expected, file.size));
    return {path, tokens, file.size};
}

Loader::Loader(const Source& source, int B, int T, int vocab, bool shuffle, uint64_t seed,
               const Tokenizer& tokenizer)
    : B_(B), T_(T), seed_(seed), vocab_(vocab), shuffle_(shuffle) {
    end_of_text_ = vocab == kByteVocab ? kByteEndOfText : kEndOfText;
    if (source.tokens) {
        check_end_of_text(source.name);
        memory_ = source.tokens->data();
        shards_.push_back(
            {source.name, source.tokens->size(), source.tokens->size() * sizeof(uint16_t)});
    } else {
        const std::vector<std::string> paths = matching_files(source.name);
        for (const std::string& path : paths) {
            shards_.push_back(inspect(path, paths.size() == 1, tokenizer));
        }
    }
    for (const Shard& shard : shards_) {
        tokens_ += shard.tokens;
        windows_ += windows_in(shard);
    }
    const bool one = shards_.size() == 1;
    if (windows_ == 0)
        throw Error(
            format("%s: too little data: %zu tokens in %zu %s, none with the %d of a sequence; "
                   "choose a smaller -t",
                   source.name.c_str(), tokens_, shards_.size(), one ? "file" : "files", T + 1));
    const std::string kind = memory_ ? source.name
                             : is_text_
                                 ? "text file"
                                 : format("%zu %s", shards_.size(), one ? "shard" : "shards");
    description_ =
        kind + ", " + human(tokens_) + (is_bpe_ ? " BPE tokens" : " tokens") + left_out();
    begin_epoch();
}

// A shard's last window needs the first token of the one that would follow it.
std::string Loader::left_out() const {
    constexpr size_t kNamed = 10;
    uint64_t tails = 0;
    uint64_t in_short = 0;
    size_t count = 0;
    std::string names;
    for (const Shard& shard : shards_) {
        if (windows_in(shard) > 0) {
            tails += shard.tokens - windows_in(shard) * T_ - 1;
            continue;
        }
        in_short += shard.tokens;
        if (count++ < kNamed)
            names += (count == 1 ? " " : ", ") + shard.path;
    }
    if (count > kNamed)
        names += format(" and %zu more", count - kNamed);
    std::string text;
    if (tails)
        text +=
            format("; left out: %zu at the %s", tails, shards_.size() > 1 ? "shards' ends" : "end");
    if (count)
        text += format("%s %zu in shards shorter than %zu:", tails ? "," : "; left out:", in_short,
                       T_ + 1) +
                names;
    return text;
}

void Loader::begin_epoch() {
    order_.resize(shards_.size());
    first_window_.assign(1, 0);
    for (size_t i = 0; i < shards_.size(); i++) {
        order_[i] = shuffle_ ? permute(i, shards_.size(), key(shards_.size())) : i;
        first_window_.push_back(first_window_.back() + windows_in(shards_[order_[i]]));
    }
}

// The T + 1 tokens of the window at state_.window.
std::vector<int> Loader::read_window() {
    const auto behind = std::upper_bound(first_window_.begin(), first_window_.end(), state_.window);
    const size_t index = order_[behind - first_window_.begin() - 1];
    const Shard& shard = shards_[index];
    uint64_t local = state_.window - behind[-1];
    if (shuffle_)
        local = permute(local, windows_in(shard), key(index));
    const uint64_t begin = local * T_;  // token of the shard
    if (is_text_)
        return {&text_[begin], &text_[begin] + T_ + 1};
    std::vector<uint16_t> tokens(T_ + 1);
    if (memory_) {
        std::copy_n(memory_ + begin, tokens.size(), tokens.data());
    } else {
        if (!file_ || file_->path != shard.path)
            file_ = std::make_unique<InputFile>(shard.path);
        file_->read(kHeaderBytes + begin * sizeof(uint16_t), tokens.data(),
                    tokens.size() * sizeof(uint16_t));
    }
    // A byte vocabulary's 256 is <|endoftext|>, which is 50256 in every shard.
    const int limit = vocab_ == kByteVocab ? kByteEndOfText : vocab_;
    std::vector<int> window(tokens.begin(), tokens.end());
    for (size_t i = 0; i < window.size(); i++) {
        const bool is_end = tokens[i] == kEndOfText;
        if (is_end)
            window[i] = end_of_text_;
        if (window[i] >= (is_end ? vocab_ : limit))
            throw Error(
                format("%s: token at offset %zu: expected less than the vocabulary of %d, found "
                       "%d; train a model with "
                       "a larger vocabulary on this data",
                       shard.path.c_str(), kHeaderBytes + (begin + i) * sizeof(uint16_t), limit,
                       tokens[i]));
    }
    return window;
}

void Loader::advance() {
    if (++state_.window < windows_)
        return;
    state_.window = 0;
    state_.epoch++;
    begin_epoch();
}

void Loader::next(int* inputs, int* targets) {
    for (uint64_t b = 0; b < B_; b++) {
        const std::vector<int> window = read_window();
        std::copy_n(window.data(), T_, inputs + b * T_);
        std::copy_n(window.data() + 1, T_, targets + b * T_);
        advance();
    }
    state_.batches++;
}

void Loader::skip(uint64_t batches) {
    for (uint64_t i = 0; i < batches * B_; i++)
        advance();
    state_.batches += batches;
}

void Loader::restore(const LoaderState& state) {
    if (state.window >= windows_)
        throw Error(
            description_ +
            format(": cannot go on at window %zu: an epoch has %zu; ", state.window, windows_) +
            "resume with the data the checkpoint was made on");
    state_ = state;
    begin_epoch();
}

// Hashes blocks of 4 KiB spread over each file, its first and its last among them. They are about
// 256 in all and at least three a file. A file no larger than its share is hashed whole. Names do
// not count, because moved data is the same data. The tokens of a text do, because another
// tokenizer makes other data of it.
uint64_t Loader::identity() const {
    constexpr uint64_t kBlockBytes = 4096;
    constexpr uint64_t kBlocks = 256;
    const uint64_t blocks = std::max<uint64_t>(3, kBlocks / shards_.size());
    std::vector<char> block(kBlockBytes);
    uint64_t hash = shards_.size();
    hash = checksum64(text_.data(), text_.size() * sizeof(uint16_t), hash);
    if (memory_)
        return checksum64(memory_, tokens_ * sizeof(uint16_t), hash);
    for (const Shard& shard : shards_) {
        const InputFile input(shard.path);
        hash = checksum64(&shard.file_bytes, sizeof shard.file_bytes, hash);
        const bool whole = shard.file_bytes <= blocks * kBlockBytes;
        const uint64_t count = whole ? (shard.file_bytes + kBlockBytes - 1) / kBlockBytes : blocks;
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t offset =
                whole ? i * kBlockBytes : (shard.file_bytes - kBlockBytes) * i / (blocks - 1);
            const size_t bytes =
                static_cast<size_t>(std::min(kBlockBytes, shard.file_bytes - offset));
            input.read(offset, block.data(), bytes);
            hash = checksum64(block.data(), bytes, hash);
        }
    }
    return hash;
}
