// Batches from token shards or plain text: where the windows of an epoch are, and how they are
// read.
//
// An epoch is a permutation of the shards and, within each, a permutation of its windows. No list
// of windows is stored, because a permutation is a keyed function of the index (permute() below).
// So any position of any epoch is found directly: resuming needs no replay, and memory does not
// grow with the data. Shards are visited one after another, so that only one file is open at a time
// and consecutive reads are from the same file.
#include "data/loader.h"

#include <glob.h>

#include <climits>

#include "data/text.h"

namespace {

// One pass of a Feistel network: a permutation of the numbers of 2·half_bits bits. Whatever the
// round function, each round can be undone by running it backwards.
uint64_t feistel(uint64_t index, int half_bits, uint64_t key) {
    constexpr uint64_t kRounds = 6;
    constexpr int kRoundBits = 3;  // of a round's number
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    uint64_t left = index >> half_bits;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < kRounds; round++) {
        const uint64_t right_and_round = (right << kRoundBits) | round;
        const uint64_t next = left ^ (mix(key ^ mix(right_and_round)) & mask);
        left = right;
        right = next;
    }
    return (left << half_bits) | right;
}

// Element `index` of a permutation of 0..n-1 that depends on `key`. The network permutes 0..4^k-1,
// where 4^k is the smallest power that is at least n; results of n or more are fed into it again
// until one is below n. That stays on one cycle of the network's permutation, which contains
// `index` itself. So it ends, and no two indices have the same result.
uint64_t permute(uint64_t index, uint64_t n, uint64_t key) {
    int half_bits = 1;
    while (half_bits < 32 && (uint64_t{1} << (2 * half_bits)) < n) {
        half_bits++;
    }
    uint64_t result = index;
    do {
        result = feistel(result, half_bits, key);
    } while (result >= n);
    return result;
}

std::string human_readable(uint64_t n) {
    const double x = static_cast<double>(n);
    if (x >= 1e9)
        return format("%.1f G", x / 1e9);
    if (x >= 1e6)
        return format("%.1f M", x / 1e6);
    return format("%zu", n);
}

std::vector<std::string> matching_files(const std::string& pattern) {
    // An existing name means that file, even if it looks like a pattern.
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) {
        if (S_ISDIR(info.st_mode))
            throw Error(pattern + ": is a directory; give a file or a quoted pattern such as " +
                        shell_quoted(glob_escaped(pattern) + "/train_*.bin"));
        return {pattern};
    }

    glob_t found;
    const int status = glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
    std::vector<std::string> paths;
    if (status == 0)
        paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);  // sorted
    globfree(&found);
    if (!paths.empty())
        return paths;

    const char* const why =
        status == GLOB_ABORTED
            ? ": a directory in this pattern does not exist or cannot be read; check the path and "
              "its permissions"
            : ": there is no such file, and no file matches it as a pattern; check the path";
    throw Error(pattern + why + ", or make token shards with data/prepare.py");
}

// Whether a shard has byte tokens and <|endoftext|> only.
bool has_only_bytes(const InputFile& shard) {
    constexpr uint64_t kTokensPerRead = 1 << 20;
    const auto is_byte = [](int token) { return token < kByteEndOfText || token == kEndOfText; };

    std::vector<uint16_t> tokens;
    uint64_t offset = kHeaderBytes;
    while (offset + sizeof(uint16_t) <= shard.size) {
        tokens.resize(std::min(kTokensPerRead, (shard.size - offset) / sizeof(uint16_t)));
        shard.read(offset, tokens.data(), tokens.size() * sizeof(uint16_t));
        if (!std::all_of(tokens.begin(), tokens.end(), is_byte))
            return false;
        offset += tokens.size() * sizeof(uint16_t);
    }
    return true;
}

// Throws Error for a file without a shard's magic that is not to be read as text either.
[[noreturn]] void refuse_magic(const std::string& path, int32_t magic, bool only_file) {
    const char* advice =
        "a pattern can only name token shards; if this is a text file, give it alone";
    if (magic == kModelMagic)
        advice = "this is a model; give token shards or text as data";
    else if (only_file)
        advice =
            "give token shards in llm.c's format or, if this is a text file, rename it so that it "
            "does not end in .bin";
    throw Error(format("%s: wrong magic at offset 0: expected %d, found %d; %s", path.c_str(),
                       kShardMagic, magic, advice));
}

}  // namespace

int vocabulary_of(const std::string& pattern, bool has_tokenizer) {
    if (has_tokenizer)
        return kGpt2Vocab;
    for (const std::string& path : matching_files(pattern)) {
        const InputFile file(path);
        int32_t magic = 0;
        file.read(0, &magic, std::min<uint64_t>(sizeof magic, file.size));
        if (magic == kShardMagic && !has_only_bytes(file))
            return kGpt2Vocab;
    }
    return kByteVocab;
}

// -------------------------------------------------------------------------------------------------
// Opening the data

void Loader::check_end_of_text(const std::string& name) const {
    if (end_of_text_ >= vocab_)
        throw Error(format(
            "%s: text needs a model with a vocabulary of %d (bytes) or at least %d (GPT-2's), but "
            "this one's is %d; give token shards",
            name.c_str(), kByteVocab, kGpt2Vocab, vocab_));
}

Loader::Shard Loader::read_text(const InputFile& file, const Tokenizer& tokenizer) {
    check_end_of_text(file.path);
    const std::string text = file.read_all();
    check_is_text(text, file.path);
    is_text_ = true;
    is_bpe_ = tokenizer.uses_bpe(vocab_);
    if (is_bpe_)
        check_utf8(text, file.path);

    for (const std::string& document : documents(text)) {
        const std::vector<int> tokens = tokenizer.encode(document, vocab_, file.path);
        text_.push_back(static_cast<uint16_t>(end_of_text_));
        text_.insert(text_.end(), tokens.begin(), tokens.end());
    }
    return {.path = file.path, .tokens = text_.size(), .file_bytes = file.size};
}

// Checks the header of a shard, or reads the file as text. `only_file`: it is all of the data.
Loader::Shard Loader::inspect(const std::string& path, bool only_file, const Tokenizer& tokenizer) {
    struct {
        int32_t magic;
        int32_t version;
        int32_t tokens;
    } header = {};
    const InputFile file(path);
    file.read(0, &header, std::min<uint64_t>(sizeof header, file.size));

    if (header.magic != kShardMagic) {
        if (path.ends_with(".bin") || header.magic == kModelMagic || !only_file)
            refuse_magic(path, header.magic, only_file);
        return read_text(file, tokenizer);
    }

    file.require(file.size >= kHeaderBytes,
                 format("truncated: expected a header of %zu bytes, found a file of %zu",
                        kHeaderBytes, file.size));
    if (header.version != 1)
        throw Error(format(
            "%s: wrong version at offset 4: expected 1, found %d; convert the shard to version 1",
            path.c_str(), header.version));
    file.require(header.tokens >= 0,
                 format("damaged header: number of tokens at offset 8: expected 0..%d, found %d",
                        INT_MAX, header.tokens));
    const uint64_t tokens = static_cast<uint64_t>(header.tokens);
    const uint64_t expected = kHeaderBytes + tokens * sizeof(uint16_t);
    file.require(
        file.size == expected,
        format("%s: the header says %zu tokens, expected %zu bytes, found %zu",
               file.size < expected ? "truncated" : "too long", tokens, expected, file.size));
    return {.path = path, .tokens = tokens, .file_bytes = file.size};
}

Loader::Loader(const Source& source, const LoaderOptions& options, const Tokenizer& tokenizer)
    : B_(options.B),
      T_(options.T),
      seed_(options.seed),
      vocab_(options.vocab),
      end_of_text_(end_of_text_id(options.vocab)),
      shuffle_(options.shuffle) {
    if (source.tokens) {
        check_end_of_text(source.name);
        memory_ = source.tokens->data();
        const size_t tokens = source.tokens->size();
        shards_.push_back(
            {.path = source.name, .tokens = tokens, .file_bytes = tokens * sizeof(uint16_t)});
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
    if (windows_ == 0)
        throw Error(format(
            "%s: too little data: %zu tokens in %zu %s, but a sequence needs %zu from the same "
            "file; use a smaller -t",
            source.name.c_str(), tokens_, shards_.size(), shards_.size() == 1 ? "file" : "files",
            T_ + 1));
    description_ = describe(source);
    begin_epoch();
}

std::string Loader::describe(const Source& source) const {
    std::string kind = format("%zu %s", shards_.size(), shards_.size() == 1 ? "shard" : "shards");
    if (memory_)
        kind = source.name;
    else if (is_text_)
        kind = "text file";
    const char* const unit = is_bpe_ ? " BPE tokens" : " tokens";
    return kind + ", " + human_readable(tokens_) + unit + left_out();
}

// Which tokens are in no window: the ends of the shards, and shards that are shorter than a window.
std::string Loader::left_out() const {
    constexpr size_t kMostNames = 10;
    uint64_t at_ends = 0;
    uint64_t in_short_shards = 0;
    size_t short_shards = 0;
    std::string names;
    for (const Shard& shard : shards_) {
        const uint64_t windows = windows_in(shard);
        if (windows > 0) {
            at_ends += shard.tokens - (windows * T_ + 1);
            continue;
        }
        in_short_shards += shard.tokens;
        short_shards++;
        if (short_shards <= kMostNames)
            names += (short_shards == 1 ? " " : ", ") + shard.path;
    }
    if (short_shards > kMostNames)
        names += format(" and %zu more", short_shards - kMostNames);

    std::string text;
    if (at_ends > 0)
        text += format("; left out: %zu at the %s", at_ends,
                       shards_.size() == 1 ? "end" : "shards' ends");
    if (short_shards > 0)
        text += format("%s %zu in shards shorter than %zu:", at_ends > 0 ? "," : "; left out:",
                       in_short_shards, T_ + 1) +
                names;
    return text;
}

// -------------------------------------------------------------------------------------------------
// Reading batches

// The key of one of this epoch's permutations: of the windows of shard `index` or, if `index` is
// the number of shards, of the shards themselves.
uint64_t Loader::permutation_key(uint64_t index) const {
    return mix(mix(seed_ ^ mix(state_.epoch)) ^ index);
}

void Loader::begin_epoch() {
    const size_t shards = shards_.size();
    order_.resize(shards);
    first_window_.assign(1, 0);
    for (size_t i = 0; i < shards; i++) {
        order_[i] = shuffle_ ? permute(i, shards, permutation_key(shards)) : i;
        first_window_.push_back(first_window_.back() + windows_in(shards_[order_[i]]));
    }
}

// The T + 1 tokens of the window at state_.window.
std::vector<int> Loader::read_window() {
    const auto next = std::upper_bound(first_window_.begin(), first_window_.end(), state_.window);
    const size_t place = next - first_window_.begin() - 1;  // of the shard in this epoch
    const size_t index = order_[place];
    const Shard& shard = shards_[index];

    uint64_t window = state_.window - first_window_[place];  // within the shard
    if (shuffle_)
        window = permute(window, windows_in(shard), permutation_key(index));
    const uint64_t begin = window * T_;
    if (is_text_)  // encoded for this vocabulary, so there is nothing to check
        return std::vector<int>(&text_[begin], &text_[begin] + T_ + 1);

    const std::vector<uint16_t> tokens = read_tokens(shard, begin);
    std::vector<int> ids;
    ids.reserve(tokens.size());
    for (size_t i = 0; i < tokens.size(); i++) {
        ids.push_back(checked_id(tokens[i], shard, begin + i));
    }
    return ids;
}

// T + 1 tokens from position `begin` of a shard or of memory.
std::vector<uint16_t> Loader::read_tokens(const Shard& shard, uint64_t begin) {
    std::vector<uint16_t> tokens(T_ + 1);
    if (memory_) {
        std::copy_n(memory_ + begin, tokens.size(), tokens.data());
        return tokens;
    }
    if (!file_ || file_->path != shard.path)
        file_ = std::make_unique<InputFile>(shard.path);
    file_->read(kHeaderBytes + begin * sizeof(uint16_t), tokens.data(),
                tokens.size() * sizeof(uint16_t));
    return tokens;
}

// The id in this vocabulary of a shard's token at this position. Shards always store <|endoftext|>
// as 50256, so a byte vocabulary's own 256 is not a valid token there.
int Loader::checked_id(uint16_t token, const Shard& shard, uint64_t position) const {
    if (token == kEndOfText && end_of_text_ < vocab_)
        return end_of_text_;

    const int limit = vocab_ == kByteVocab ? kByteEndOfText : vocab_;
    if (token < limit)
        return token;
    throw Error(format(
        "%s: token at offset %zu: expected 0..%d (the model's vocabulary), found %d; use a model "
        "with a larger vocabulary",
        shard.path.c_str(), kHeaderBytes + position * sizeof(uint16_t), limit - 1, token));
}

void Loader::advance() {
    state_.window++;
    if (state_.window < windows_)
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
    for (uint64_t i = 0; i < batches * B_; i++) {
        advance();
    }
    state_.batches += batches;
}

void Loader::restore(const LoaderState& state) {
    if (state.window >= windows_)
        throw Error(format(
            "%s: an epoch has %zu sequences, but the checkpoint is at sequence %zu; resume with "
            "the data that the run began with",
            description_.c_str(), windows_, state.window));
    state_ = state;
    begin_epoch();
}

// Hashes blocks of 4 KiB that are spread over each file, including its first and its last: about
// 256 blocks in all, but at least three per file. A file that is no larger than its blocks is
// hashed as a whole. Names are not hashed, because data that was moved is still the same. The
// tokens of a text file are, because another tokenizer makes other data of it.
uint64_t Loader::identity() const {
    constexpr uint64_t kBlockBytes = 4096;
    constexpr uint64_t kBlocks = 256;
    uint64_t hash = shards_.size();
    hash = checksum64(text_.data(), text_.size() * sizeof(uint16_t), hash);
    if (memory_)
        return checksum64(memory_, tokens_ * sizeof(uint16_t), hash);

    const uint64_t blocks_per_file = std::max<uint64_t>(3, kBlocks / shards_.size());
    std::vector<char> block(kBlockBytes);
    for (const Shard& shard : shards_) {
        const InputFile input(shard.path);
        const uint64_t size = shard.file_bytes;
        hash = checksum64(&size, sizeof size, hash);

        const bool whole = size <= blocks_per_file * kBlockBytes;
        const uint64_t count = whole ? (size + kBlockBytes - 1) / kBlockBytes : blocks_per_file;
        for (uint64_t i = 0; i < count; i++) {
            const uint64_t offset =
                whole ? i * kBlockBytes : (size - kBlockBytes) * i / (blocks_per_file - 1);
            const uint64_t bytes = std::min(kBlockBytes, size - offset);
            input.read(offset, block.data(), bytes);
            hash = checksum64(block.data(), bytes, hash);
        }
    }
    return hash;
}
