// Batches from token shards or plain text.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/random.h"
#include "data/file.h"
#include "data/tokenizer.h"

// The position of a loader in its data: enough to resume with exactly the batches that follow.
struct LoaderState {
    uint64_t epoch = 0;
    uint64_t window = 0;   // windows of this epoch that have been read
    uint64_t batches = 0;  // batches read since the start
};

// Where a loader's tokens come from: files, or memory.
struct Source {
    // a file, a glob pattern or, if the tokens are in memory, what messages call them
    std::string name = {};
    // tokens in memory, as GPT-2's ids, or null; they must outlive the loader
    const std::vector<uint16_t>* tokens = nullptr;

    Source() = default;
    Source(const char* pattern) : name(pattern) {}
    Source(const std::string& pattern) : name(pattern) {}
    Source(const std::string& name, const std::vector<uint16_t>& tokens)
        : name(name), tokens(&tokens) {}
    bool empty() const { return name.empty(); }
};

// The size of the vocabulary that this data needs: of bytes, or GPT-2's, which is needed anyway if
// there is a tokenizer. This reads a shard's tokens until it finds one that is not a byte.
int vocabulary_of(const std::string& pattern, bool has_tokenizer);

struct LoaderOptions {
    int B = 1;
    int T = 1;
    int vocab = kGpt2Vocab;
    bool shuffle = false;
    uint64_t seed = 0;  // for the shuffle
};

// Reads windows of T + 1 tokens, which start every T tokens of each shard, so that the last target
// of a window is the first input of the next. B windows make a batch. An epoch has every window
// once; with `shuffle`, (seed, epoch) determines the order of the shards and of the windows in each
// shard. If B does not divide the number of windows, an epoch's last batch continues with windows
// of the next epoch. The tokens after a shard's last window are never read; description() says how
// many they are.
//
// A source is one of
// - llm.c shards, one or those that match a glob pattern: a header of 256 int32 (magic 20240520,
//   version 1, count), then uint16 tokens. They are read as needed, never as a whole, so there can
//   be many and they can be larger than 2 GiB;
// - one text file, which is any file that is not a shard. Each of its documents() starts with
//   <|endoftext|>. It is encoded in BPE if there is a tokenizer file and a vocabulary like GPT-2's,
//   and otherwise in bytes. Its tokens are kept in memory;
// - tokens in memory.
//
// A vocabulary of kByteVocab has <|endoftext|> as 256. A token outside of the vocabulary is an
// Error that names the file and the offset. It is also an Error if no file matches, if a file is
// neither a shard nor text, if a header or a size is wrong, or if there is not a single window.
class Loader {
  public:
    Loader(const Source& source, const LoaderOptions& options, const Tokenizer& tokenizer = {});

    // Writes inputs and targets (B, T). The targets are the inputs shifted by one token.
    void next(int* inputs, int* targets);
    void skip(uint64_t batches);   // advances like next(), without reading
    void reset() { restore({}); }  // to the first batch of epoch 0

    LoaderState state() const { return state_; }
    void restore(const LoaderState&);

    uint64_t windows() const { return windows_; }  // per epoch
    // "12 shards, 1.2 G tokens", "text file, 3.4 M tokens" or "text file, 0.9 M BPE tokens", and
    // then, if there are any, how many tokens are in no window and which shards have no window.
    const std::string& description() const { return description_; }
    // A hash of the sizes of the shards and of samples of their content, which tells data apart.
    uint64_t identity() const;

  private:
    struct Shard {
        std::string path;
        uint64_t tokens;
        uint64_t file_bytes;
    };

    uint64_t B_;
    uint64_t T_;
    uint64_t seed_;
    int vocab_;
    int end_of_text_;  // the id of <|endoftext|> in this vocabulary
    bool shuffle_;

    bool is_text_ = false;
    bool is_bpe_ = false;
    std::vector<Shard> shards_;         // a text file or tokens in memory count as one
    std::vector<uint16_t> text_;        // the tokens of a text file
    const uint16_t* memory_ = nullptr;  // tokens in memory
    uint64_t tokens_ = 0;               // in all shards
    uint64_t windows_ = 0;              // in all shards
    std::string description_;

    LoaderState state_;
    std::vector<size_t> order_;  // the shards in the order of this epoch
    // Element i: how many windows of this epoch come before those of shard order_[i]. There is
    // one element more than in order_, which is windows_.
    std::vector<uint64_t> first_window_;
    std::unique_ptr<InputFile> file_;  // the shard that was read last

    void check_end_of_text(const std::string& name) const;
    Shard inspect(const std::string& path, bool only_file, const Tokenizer& tokenizer);
    Shard read_text(const InputFile& file, const Tokenizer& tokenizer);
    std::string describe(const Source& source) const;
    std::string left_out() const;
    uint64_t windows_in(const Shard& shard) const {
        return shard.tokens > 0 ? (shard.tokens - 1) / T_ : 0;
    }

    uint64_t permutation_key(uint64_t index) const;
    void begin_epoch();
    void advance();
    std::vector<int> read_window();
    std::vector<uint16_t> read_tokens(const Shard& shard, uint64_t begin);
    int checked_id(uint16_t token, const Shard& shard, uint64_t position) const;
};
