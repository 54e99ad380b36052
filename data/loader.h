// Batches from token shards or plain text.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Where the loader is, enough to go on bit-exactly.
struct LoaderState {
    uint64_t epoch = 0, window = 0;  // windows of this epoch handed out
    uint64_t batches = 0;            // handed out since the start
};

// Windows of T+1 tokens that start every T tokens of each shard (the last target of one window is the first input of the
// next). An epoch visits every window once; with shuffle, shards and windows are permuted anew each epoch by (seed,
// epoch). B windows make a batch; an epoch that does not divide goes on in the next one.
//
// `pattern`: a file or a glob of llm.c shards (256×int32 header: magic 20240520, version 1, count; then uint16), or one
// plain text file (anything else that is a file), tokenised to byte ids as it is read, one document after <|endoftext|>.
// Shards may be many and larger than 2 GiB: they are read as needed, never loaded whole.
// vocab: ids ≥ vocab are an error that names file and offset; with vocab == kByteVocab <|endoftext|> is mapped to 256.
// Errors (Error): no match, wrong magic or version, truncated (expected and found bytes), token ≥ vocab, fewer than
// B windows.
class Loader {
  public:
    Loader(const std::string& pattern, int B, int T, int vocab, bool shuffle, uint64_t seed);
    ~Loader();

    // inputs and targets (B,T); targets are inputs shifted by one.
    void next(int* inputs, int* targets);
    void skip(uint64_t batches);  // as next, without reading them
    void reset();  // back to the first batch of epoch 0

    LoaderState state() const;
    void restore(const LoaderState&);

    uint64_t num_tokens() const;       // in all shards
    uint64_t batches_per_epoch() const;  // whole batches
    uint64_t identity() const;         // hash of the shards' sizes and of samples of their content: which data this is
    const std::string& description() const;  // "12 shards, 1.2 G tokens" / "text file, 3.4 M tokens"

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};
