// GPT-2 training, top to bottom: config → tensors → forward → backward → update → main.
//
//   make train_gpt2cu && ./train_gpt2cu          trains a 124M model on the built-in corpus
//   ./train_gpt2cu --help                        every option
//
// The model is written once over two backends. `Dev` is Cuda (layers/, attention/) or Cpu (layers/cpu), and both
// have the same layer calls. `X` is the type in which weights and activations are stored. On CUDA it is bf16 or float.
// On the CPU it is float, and in tests also double. Sums, statistics, gradients of weights and optimizer state have
// the type A = Acc<X>.
#include <nvtx3/nvToolsExt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "attention/ring/blocks.h"
#include "data/corpus.h"
#include "data/file.h"
#include "data/loader.h"
#include "data/random.h"
#include "data/tokenizer.h"
#include "layers/comm/comm.h"
#include "layers/comm/job.h"
#include "layers/comm/reference_comm.h"
#include "layers/gpu/error.h"
#include "layers/layers.h"
#include "run/checkpoint.h"
#include "run/choices.h"
#include "run/log.h"
#include "run/options.h"
#include "run/peak.h"
// This comes last, because it is written over both backends' block forms.
#include "attention/ring/ring.h"

// A named stretch of the timeline for Nsight Systems (make profile). It is also a sign of life for the ranks that wait.
struct Range {
    explicit Range(const char* name) { nvtxRangePushA(name), Job::progress()++; }
    Range(const char* name, int i) : Range(format("%s %d", name, i).c_str()) {}
    ~Range() { nvtxRangePop(); }
};

// =====================================================================================================================
// Config

struct Config {
    int max_T, V, Vp, L, NH, C;  // positions, vocabulary, padded vocabulary, layers, heads, channels

    int HS() const { return C / NH; }
    size_t flops_per_token(int T) const;  // forward and backward
};

// "d12", "d24", "d36" and "d48" are GPT-2 with that many layers. "tiny" is what a CPU trains in a minute, on single
// bytes.
static bool find_config(const std::string& name, Config* config) {
    struct Preset {
        const char* name;
        Config config;
    };
    static const Preset presets[] = {
        {"tiny", {256, kByteVocab, 384, 4, 2, 128}}, {"d12", {1024, 50257, 50304, 12, 12, 768}},
        {"d24", {1024, 50257, 50304, 24, 16, 1024}}, {"d36", {1024, 50257, 50304, 36, 20, 1280}},
        {"d48", {1024, 50257, 50304, 48, 25, 1600}},
    };
    for (const Preset& p : presets)
        if (name == p.name) return *config = p.config, true;
    return false;
}

static Config config_of(const ModelHeader& h) {
    return {h.max_T, h.V, h.Vp, h.L, h.NH, h.C};
}
static ModelHeader header_of(const Config& c, DType dtype) {
    return {dtype, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
}

// =====================================================================================================================
// Tensors
//
// One table per arena lists its tensors. It drives allocation, the pointers below, the memory report, checkpoints and
// the search for the first tensor that is not finite.

struct TensorSpec {
    const char* name;
    DType dtype;
    size_t size;     // elements, of one layer if there are several
    int layers = 0;  // 0 for a tensor that is not per layer, kShared if every layer overwrites the last one's
    static constexpr int kShared = -1;
    bool decay = false;
    bool matmul = false;  // a matmul's weight
    size_t elements() const { return size * static_cast<size_t>(std::max(layers, 1)); }
};

struct Arena {
    const char* name = "";
    std::vector<TensorSpec> tensors;
    std::vector<size_t> offsets;  // bytes from base
    size_t bytes = 0;
    char* base = nullptr;

    Arena() = default;
    // align = 1 packs the tensors as they lie in a checkpoint.
    Arena(const char* name, std::vector<TensorSpec> specs, size_t align = 256) : name(name), tensors(std::move(specs)) {
        for (const TensorSpec& t : tensors) {
            offsets.push_back(bytes);
            bytes += (t.elements() * size_of(t.dtype) + align - 1) / align * align;
        }
    }
    // Tensor i, or layer l's part of it.
    void* at(size_t i, int l = 0) const {
        if (i >= tensors.size() || tensors[i].elements() == 0) return nullptr;  // as in a model that only generates
        const TensorSpec& t = tensors[i];
        return base + offsets[i] + (t.layers > 0 ? static_cast<size_t>(l) * t.size * size_of(t.dtype) : 0);
    }
};

// The sixteen parameter tensors in llm.c's file order. A per-layer tensor's pointer is to that layer's part. P is X for
// the parameters themselves and A for their gradients.
template <class P>
struct Parameters {
    P *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    P *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb, *lnfw, *lnfb;
};

static std::vector<TensorSpec> parameter_specs(const Config& c, DType t) {
    const size_t C = c.C, V = c.Vp, P = c.max_T;
    const int L = c.L;
    return {{"wte", t, V * C, 0, true, true},
            {"wpe", t, P * C, 0, true},
            {"ln1w", t, C, L},
            {"ln1b", t, C, L},
            {"qkvw", t, 3 * C * C, L, true, true},
            {"qkvb", t, 3 * C, L},
            {"attprojw", t, C * C, L, true, true},
            {"attprojb", t, C, L},
            {"ln2w", t, C, L},
            {"ln2b", t, C, L},
            {"fcw", t, 4 * C * C, L, true, true},
            {"fcb", t, 4 * C, L},
            {"fcprojw", t, 4 * C * C, L, true, true},
            {"fcprojb", t, C, L},
            {"lnfw", t, C},
            {"lnfb", t, C}};
}

static size_t count_parameters(const Config& c) {
    size_t n = 0;
    for (const TensorSpec& t : parameter_specs(c, DType::f32)) n += t.elements();
    return n;
}

// Each parameter costs 2 FLOPs forward and 4 backward, and causal attention 6·L·C·T.
size_t Config::flops_per_token(int T) const {
    return 6 * count_parameters(*this) + 6 * static_cast<size_t>(L) * C * T;
}

// Those FLOPs as a percentage of what all ranks' GPUs can do at `peak` TFLOP/s each. NaN if the peak is not known.
static double mfu_percent(const Config& config, int T, double tok_s, int ranks, double peak) {
    return peak > 0 ? 100 * tok_s * config.flops_per_token(T) / (ranks * peak * 1e12) : NAN;
}

// What forward keeps for backward. A per-layer tensor's pointer is to one layer's part. N = B·T rows.
template <class X>
struct Activations {
    X* encoded;                  // (N, C) wte + wpe
    X* ln1;                      // (N, C)
    Acc<X>*ln1_mean, *ln1_rstd;  // (N)
    X* qkv;                      // (N, 3, NH, HS)
    X* atty;                     // (N, NH, HS)
    Acc<X>* lse;                 // (B, NH, T)
    X* att;                      // (B, NH, T, T), naive attention only
    X* residual2;                // (N, C) after attention
    X* ln2;                      // (N, C)
    Acc<X>*ln2_mean, *ln2_rstd;  // (N)
    X *fch, *gelu;               // (N, 4C) before and after GELU
    X* residual3;                // (N, C) after the MLP
    X* lnf;                      // (N, C)
    Acc<X>*lnf_mean, *lnf_rstd;  // (N)
};

// Buffers that every layer reuses.
template <class X>
struct Buffers {
    X* logits;       // (chunk, Vp), because the classifier works through the rows a chunk at a time
    Acc<X>* losses;  // (N)
    Acc<X>* stats;   // mean loss of each micro-batch, rank after rank, the gradient's norm, and each share's norm
    Acc<X>* share;   // if the optimizer is sharded, this rank's share of the summed gradients, and a gate
    X* dresidual;    // (N, C) gradient of the residual stream
    X* wide;         // (N, 4C) gradient of fch, then of qkv. It lies over GELU's outputs if those are kept
    void* scratch;   // for whichever layer runs: D, partial sums, pointers
    int* batch;      // tokens, targets and encoder plans of a whole step
};

// =====================================================================================================================
// Several ranks
//
// In data parallel training rank r of n trains on micro-batches r, r + n, … of every step, and gradients are summed
// over the ranks. If the optimizer is sharded (ZeRO-1, Rajbhandari et al. 2020), a rank gets only its share of the
// summed gradients. It keeps optimizer state and updates parameters for that share alone, and then all ranks gather the
// parameters.
//
// Gradients are summed all at once after backward, or with --overlap each layer's matmul weights as soon as backward
// has finished that layer. Between machines there is much time to hide. On one machine hiding it costs more than it
// saves. On 4 H200s with 124M at B = 64 a step without any sums takes 105.5 ms. With all of them at its end it takes
// 108.0, and with each layer's sums beside the next layer's backward 109.4 (ZeRO-1: 106.6, 107.0, 108.0). Sums that
// began with attention's or GELU's backward gave 108.8 and 109.8, and at most 8 blocks for NCCL gave 111. There are two
// likely reasons. NCCL's blocks hold multiprocessors that a matmul of one persistent block per multiprocessor counts
// on. And where the power cap decides the clock, the power they draw is missing elsewhere.
//
// Rank r's share is part r of n of every tensor, or of each layer's part of a tensor that is summed by layer. The
// gradients and the state of a share lie back to back.
static bool by_layer(const TensorSpec& t, bool overlap) {
    return overlap && t.matmul && t.layers > 0;
}
static std::vector<ParamRange> share_of(const Arena& params, int rank, int ranks, bool overlap) {
    std::vector<ParamRange> share;
    size_t at = 0, state = 0;
    for (const TensorSpec& t : params.tensors) {
        const size_t pieces = by_layer(t, overlap) ? t.layers : 1, stride = t.elements() / pieces;
        const size_t size = stride / ranks, begin = at + rank * size;
        if (ranks == 1)  // everything, one piece per tensor
            share.push_back({at, t.elements(), t.decay});
        else
            share.push_back({begin, size, t.decay, pieces, stride, begin - state});
        at += t.elements(), state += pieces * size;
    }
    return share;
}

// Calls f(place in the whole state, place in the share's state, elements) for every piece of a share. The optimizer has
// `arrays` arrays (m, v and perhaps master) of n elements each in the whole.
template <class F>
static void for_each_piece(const std::vector<ParamRange>& share, size_t n, int ranks, size_t arrays, F f) {
    for (size_t array = 0; array < arrays; array++)
        for (const ParamRange& r : share)
            for (size_t p = 0; p < r.pieces; p++) f(array * n + r.piece(p), array * (n / ranks) + r.state(p), r.size);
}

// In context parallel training groups of `context` neighbouring ranks share their sequences. Each rank has two chunks
// of every sequence (attention/ring/ring.h). Layers that work on single rows do not notice, and attention goes around the
// ring. A group reads the batches that a single rank would read otherwise. Gradients are summed over all ranks as
// before.
//
// What a model needs to know about the other ranks. By default it is alone.
template <class Dev>
struct Ranks {
    typename Dev::Comm *comm = nullptr, *ring = nullptr;  // of all ranks, and of those that share sequences
    int rank = 0, size = 1;
    bool sharded = false, overlap = false;
    int context = 1;                                     // ranks that share a sequence
    int groups() const { return size / context; }        // each with sequences of its own
    int group() const { return rank / context; }         // this rank's
    int context_rank() const { return rank % context; }  // within it
};

// Every rank's share of a tensor with C channels must be whole 16-byte vectors.
static bool can_shard(const Config& c, int ranks) {
    return c.C % (4 * ranks) == 0;
}

// =====================================================================================================================
// The model

template <class Dev, class X>
class GPT2 {
  public:
    using A = Acc<X>;
    static constexpr bool has_master = !std::is_same_v<X, A>;  // bf16: fp32 master weights beside the parameters

    const Dev& dev;
    const Config config;
    const Attention attention;
    const int B, T, micro_steps;  // T: this rank's tokens of a sequence
    const bool training;
    const int recompute;
    const Ranks<Dev> ranks;
    const size_t num_parameters;
    Arena params, grads, adam, acts, buffers, ring_memory;

    // Makes only the tables. allocate() makes them memory. training adds gradients, optimizer state and what backward
    // needs. At recompute 1 forward does not keep GELU's outputs, at 2 nor the layer norms', and backward computes them
    // again. micro_steps is this rank's number.
    GPT2(const Dev& dev, const Config& config, Attention attention, int B, int T, int micro_steps, bool training,
         int recompute = 0, const Ranks<Dev>& ranks = {});
    ~GPT2() {
        for (Arena* a : arenas()) dev.free(a->base);
    }
    // The orderly end. All ranks call it together, and afterwards the memory may be freed. Nobody calls it while an
    // Error unwinds, because the others might not come.
    void leave_ring() {
        if (ring_) ring_->stop();
    }
    GPT2(const GPT2&) = delete;
    GPT2& operator=(const GPT2&) = delete;

    std::array<Arena*, 6> arenas() { return {&params, &grads, &adam, &acts, &buffers, &ring_memory}; }
    size_t total_bytes() {
        size_t bytes = 0;
        for (Arena* a : arenas()) bytes += a->bytes;
        return bytes;
    }
    void allocate();

    void init_random(uint64_t seed);
    void load(const std::string& path);

    // A step uploads all its micro-batches, then calls forward, loss (which starts backward) and backward for each.
    size_t batch_ints() const { return 2 * rows_ + encoder_plan_ints(dev, rows_); }  // of one micro-batch
    void fill_batch(int* host, Loader& loader) const;  // tokens, targets, plan of one micro-batch
    void upload(const int* host, int micro_batches);
    // Device tokens (b, t) → acts.lnf. alone means that the tokens are a whole sequence and no other rank takes part.
    void forward(const int* tokens, int b, int t, bool alone = false);
    // Adds to the weight gradients if accumulate is true, and overwrites them otherwise.
    void loss(const int* targets, int b, int t, A* mean_loss, bool with_gradient, bool accumulate = true);
    void backward(const int* plan, bool accumulate, bool sum_over_ranks);
    void clear_gradients();
    void train_micro_batch(int i, bool sum_over_ranks = false);
    void train_micro_batches();  // all of a step
    void update(const AdamW& hyper);
    void evaluate_micro_batch(int i);

    const int* tokens(int i) const { return buffers_.batch + i * batch_ints(); }
    const int* targets(int i) const { return tokens(i) + rows_; }
    const int* plan(int i) const { return tokens(i) + 2 * rows_; }
    A* stats() const { return buffers_.stats; }
    size_t num_losses() const { return size_t(ranks.size) * micro_steps; }  // of a step, in stats()
    A* own_stats() const { return stats() + ranks.rank * micro_steps; }     // this rank's losses
    A* losses() const { return buffers_.losses; }                           // (N) of the last micro-batch

    std::vector<float> logits_of_last(const std::vector<int>& context);
    std::string first_nonfinite();

    Parameters<X> weights(int l = 0) const { return view<X>(params, l); }
    Parameters<A> gradients(int l = 0) const { return view<A>(grads, l); }
    Activations<X> activations(int l = 0) const;
    A* adam_m() const { return static_cast<A*>(adam.at(0)); }
    A* adam_v() const { return static_cast<A*>(adam.at(1)); }
    A* master() const { return static_cast<A*>(has_master ? adam.at(2) : nullptr); }
    int sequence() const { return T * ranks.context; }             // tokens of a whole one
    int shards() const { return ranks.sharded ? ranks.size : 1; }  // of the optimizer
    std::vector<ParamRange> share(int rank) const { return share_of(params, rank, shards(), ranks.overlap); }

  private:
    const size_t rows_, chunk_;  // N = B·T, rows of logits that exist at once
    Buffers<X> buffers_{};
    std::unique_ptr<Ring<Dev, X>> ring_;  // if several ranks share a sequence
    typename Dev::Graph graph_;           // of train_micro_batches

    template <class P>
    static Parameters<P> view(const Arena& arena, int l) {
        size_t i = 0;
        auto next = [&] { return static_cast<P*>(arena.at(i++, l)); };
        return {next(), next(), next(), next(), next(), next(), next(), next(),
                next(), next(), next(), next(), next(), next(), next(), next()};
    }
    std::string count_in(const Arena& arena, size_t i, int l);
    Positions positions() const;  // of this rank's tokens
    void set_parameters(std::vector<A>& values);
    void sum_gradients(int layer);
    void gather_parameters();
};

// Rows of logits that exist at once. They are enough to fill the GPU, and so few that (B·T, Vp) never exists whole.
static size_t classifier_chunk(size_t rows, int Vp, DType t) {
    size_t chunk = 512;
    while (chunk < rows && 2 * chunk * Vp * size_of(t) <= (size_t(512) << 20)) chunk *= 2;
    return std::min(chunk, rows);
}

// A gate of a few elements, 0 or NaN, follows the gradients. update() writes 0·loss there and includes it in the norm.
// So one number stops the update if a gradient or a loss is not finite. There are four elements to keep the norm's
// 16-byte loads possible.
constexpr size_t kGate = 4;

constexpr int kNoLayer = -1;

template <class Dev, class X>
GPT2<Dev, X>::GPT2(const Dev& dev, const Config& config, Attention attention, int B, int T, int micro_steps,
                   bool training, int recompute, const Ranks<Dev>& ranks)
    : dev(dev),
      config(config),
      attention(attention),
      B(B),
      T(T),
      micro_steps(micro_steps),
      training(training),
      recompute(recompute),
      ranks(ranks),
      num_parameters(count_parameters(config)),
      rows_(size_t(B) * T),
      chunk_(classifier_chunk(rows_, config.Vp, dtype_of<X>())) {
    if (sequence() > config.max_T)
        throw Error(format("T = %d is beyond the model's %d positions: use -t %d or less", sequence(), config.max_T,
                           config.max_T));
    if (ranks.context > 1 && attention != Attention::flash)
        throw UsageError("--context-parallel needs --attention flash: naive has no block form");
    if (ranks.sharded && !can_shard(config, ranks.size))
        throw UsageError(
            format("--zero 1: %d channels cannot be divided among %d ranks: use --zero 0, or a number of "
                   "ranks that divides %d",
                   config.C, ranks.size, config.C / 4));
    const size_t N = rows_, C = config.C, NH = config.NH, n = num_parameters;
    const DType x = dtype_of<X>(), a = dtype_of<A>();
    const int L = config.L, HS = config.HS();

    if (ranks.context > 1)
        ring_ = std::make_unique<Ring<Dev, X>>(dev, ranks.context_rank(), ranks.context, B, T / 2, NH, HS);

    params = Arena("parameters", parameter_specs(config, x), 1);
    if (training) {
        std::vector<TensorSpec> specs = parameter_specs(config, a);
        specs.push_back({"loss", a, kGate});
        grads = Arena("gradients", specs, 1);
        const size_t own = n / shards();
        // The arrays lie back to back for any number of shards, because a checkpoint is put together from their pieces.
        adam = Arena("optimizer", {{"m", a, own}, {"v", a, own}, {"master", a, has_master ? own : 0}}, 16);
    }
    const size_t saved = attention_saved_bytes<X>(dev, attention, B, T, NH, HS) / sizeof(X);
    const auto kept_below = [&](int level) { return training && recompute < level ? L : TensorSpec::kShared; };
    const int kept = kept_below(INT_MAX), gelu = kept_below(1), ln = kept_below(2);
    acts = Arena("activations", {{"encoded", x, N * C},
                                 {"ln1", x, N * C, ln},
                                 {"ln1_mean", a, N, kept},
                                 {"ln1_rstd", a, N, kept},
                                 {"qkv", x, N * 3 * C, kept},
                                 {"atty", x, N * C, kept},
                                 {"lse", a, N * NH, kept},
                                 {"att", x, saved, kept},
                                 {"residual2", x, N * C, kept},
                                 {"ln2", x, N * C, ln},
                                 {"ln2_mean", a, N, kept},
                                 {"ln2_rstd", a, N, kept},
                                 {"fch", x, N * 4 * C, kept},
                                 {"gelu", x, N * 4 * C, gelu},
                                 {"residual3", x, N * C, kept},
                                 {"lnf", x, N * C},
                                 {"lnf_mean", a, N},
                                 {"lnf_rstd", a, N}});
    const int most_alone = ring_ ? 1 : B;  // sequences that attention gets without the ring, which are samples
    const size_t scratch =
        std::max({attention_scratch_bytes<X>(dev, attention, most_alone, T, NH, HS),
                  encoder_scratch_bytes(dev, B, T, C), layernorm_scratch_bytes(dev, C), qkv_bias_scratch_bytes(dev, C),
                  matmul_gelu_scratch_bytes(dev, N, 4 * C, C), reduce_scratch_bytes(dev), size_t(256)});
    buffers = Arena("buffers", {{"logits", x, chunk_ * config.Vp},
                                {"losses", a, N},
                                {"stats", a, num_losses() + 1 + ranks.size},
                                {"share", a, training && ranks.sharded ? n / ranks.size + kGate : 0},
                                {"dresidual", x, training ? N * C : 0},
                                {"wide", x, training && recompute >= 1 ? N * 4 * C : 0},
                                {"scratch", DType::i32, (scratch + 3) / 4},
                                {"batch", DType::i32, size_t(micro_steps) * batch_ints()}});
    // A separate allocation, because other ranks map it and write into it.
    if (ring_) ring_memory = Arena("ring", {{"ring", DType::i32, ring_->bytes() / 4}});
}

template <class Dev, class X>
void GPT2<Dev, X>::allocate() {
    for (Arena* a : arenas())
        if (a->bytes) a->base = static_cast<char*>(dev.alloc(a->bytes));
    const Arena& b = buffers;
    buffers_ = {static_cast<X*>(b.at(0)),
                static_cast<A*>(b.at(1)),
                static_cast<A*>(b.at(2)),
                static_cast<A*>(b.at(3)),
                static_cast<X*>(b.at(4)),
                static_cast<X*>(b.at(5)),
                b.at(6),
                static_cast<int*>(b.at(7))};
    if (ring_) ring_->start(ring_memory.base, ranks.ring);
    if (adam.base) dev.zero(adam.base, adam.bytes);
}

template <class Dev, class X>
Activations<X> GPT2<Dev, X>::activations(int l) const {
    size_t i = 0;
    auto x = [&] { return static_cast<X*>(acts.at(i++, l)); };
    auto a = [&] { return static_cast<A*>(acts.at(i++, l)); };
    return {x(), x(), a(), a(), x(), x(), a(), x(), x(), x(), a(), a(), x(), x(), x(), x(), a(), a()};
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward: tokens (b, t) → the final layer norm's output

template <class Dev, class X>
void GPT2<Dev, X>::forward(const int* tokens, int b, int t, bool alone) {
    Range range("forward");
    const size_t N = size_t(b) * t;
    const int C = config.C, L = config.L, NH = config.NH, HS = config.HS();
    Activations<X> a = activations(0);
    Parameters<X> w = weights(0);

    encoder_forward(dev, a.encoded, tokens, w.wte, w.wpe, b, t, C, alone ? Positions{} : positions());
    layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, a.encoded, w.ln1w, w.ln1b, N, C);
    X* residual = a.encoded;
    for (int l = 0; l < L; l++) {
        Range range("layer", l);
        a = activations(l), w = weights(l);
        matmul_forward(dev, a.qkv, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C);
        if (ring_ && !alone)
            ring_->forward(a.atty, a.lse, a.qkv);
        else
            attention_forward(dev, attention, a.atty, a.lse, a.att, buffers_.scratch, a.qkv, b, t, NH, HS);
        matmul_forward(dev, a.residual2, a.atty, w.attprojw, w.attprojb, N, C, C);
        residual_layernorm_forward(dev, a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.residual2, w.ln2w,
                                   w.ln2b, N, C);
        matmul_gelu_forward(dev, a.gelu, a.fch, a.ln2, w.fcw, w.fcb, N, C, 4 * C);
        matmul_forward(dev, a.residual3, a.gelu, w.fcprojw, w.fcprojb, N, 4 * C, C);
        // The layer norm that reads the residual also adds to it. After the last layer that is the final layer norm.
        if (l + 1 < L) {
            const Activations<X> next = activations(l + 1);
            const Parameters<X> nw = weights(l + 1);
            residual_layernorm_forward(dev, a.residual3, next.ln1, next.ln1_mean, next.ln1_rstd, a.residual2,
                                       a.residual3, nw.ln1w, nw.ln1b, N, C);
        } else {
            residual_layernorm_forward(dev, a.residual3, a.lnf, a.lnf_mean, a.lnf_rstd, a.residual2, a.residual3,
                                       w.lnfw, w.lnfb, N, C);
        }
        residual = a.residual3;
    }
}

// Cross-entropy over the rows of lnf, in chunks of rows. Writes the mean to mean_loss. With gradient, it also does what
// needs a chunk's logits. It adds into dwte and overwrites lnf with d(mean loss of the step)/d lnf.
template <class Dev, class X>
void GPT2<Dev, X>::loss(const int* targets, int b, int t, A* mean_loss, bool with_gradient, bool accumulate) {
    Range range("loss");
    const size_t N = size_t(b) * t;
    const int C = config.C, V = config.V, Vp = config.Vp;
    X* lnf = activations().lnf;
    const X* wte = weights().wte;
    const A dloss = with_gradient ? A(1) / (A(N) * num_losses()) : A(0);
    for (size_t row = 0; row < N; row += chunk_) {
        const size_t n = std::min(chunk_, N - row);
        matmul_forward<X>(dev, buffers_.logits, lnf + row * C, wte, nullptr, n, C, Vp);
        classifier(dev, buffers_.logits, buffers_.losses + row, targets + row, dloss, n, V, Vp);
        if (with_gradient)
            matmul_backward<X>(dev, lnf + row * C, gradients().wte, buffers_.logits, lnf + row * C, wte, n, C, Vp,
                               accumulate || row > 0);
    }
    reduce_sum(dev, mean_loss, buffers_.scratch, buffers_.losses, A(1) / A(N), N);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: adds into the gradients of all parameters, or overwrites the matmul weights' if not `accumulate`. It starts
// from lnf, where loss() left its gradient, and reuses that memory for the gradient of each layer norm's output.

template <class Dev, class X>
void GPT2<Dev, X>::backward(const int* plan, bool accumulate, bool sum_over_ranks) {
    Range range("backward");
    const size_t N = rows_;
    const int C = config.C, NH = config.NH, HS = config.HS();
    X* dresidual = buffers_.dresidual;
    void* scratch = buffers_.scratch;
    Activations<X> a = activations(config.L - 1);
    X* dln = a.lnf;
    Parameters<X> w = weights();
    Parameters<A> g = gradients();

    // A layer norm's backward also sums the rows of the residual stream's gradient. That is the bias gradient of the
    // projection that was added there last.
    dev.zero(dresidual, N * C * sizeof(X));
    layernorm_backward(dev, dresidual, g.lnfw, g.lnfb, gradients(config.L - 1).fcprojb, scratch, dln, a.residual3,
                       w.lnfw, a.lnf_mean, a.lnf_rstd, N, C);
    for (int l = config.L - 1; l >= 0; l--) {
        Range range("layer", l);
        a = activations(l), w = weights(l), g = gradients(l);
        const X* residual = l ? activations(l - 1).residual3 : a.encoded;
        A* bias_below = l ? gradients(l - 1).fcprojb : nullptr;
        X* wide = recompute >= 1 ? buffers_.wide : a.gelu;
        auto fcproj_weight_gradient = [&] {
            matmul_backward<X>(dev, nullptr, g.fcprojw, dresidual, a.gelu, nullptr, N, 4 * C, C, accumulate);
        };
        if (recompute == 0) fcproj_weight_gradient();  // before fch's gradient takes the place of GELU's output
        matmul_gelu_backward(dev, wide, g.fcb, recompute >= 1 ? a.gelu : nullptr, scratch, dresidual, w.fcprojw, a.fch,
                             N, 4 * C, C);
        if (recompute >= 1) fcproj_weight_gradient();  // needs the output that the pass over fch recomputed
        if (recompute >= 2) layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N, C);
        matmul_backward(dev, dln, g.fcw, wide, a.ln2, w.fcw, N, C, 4 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln2w, g.ln2b, g.attprojb, scratch, dln, a.residual2, w.ln2w, a.ln2_mean,
                           a.ln2_rstd, N, C);
        matmul_backward(dev, dln, g.attprojw, dresidual, a.atty, w.attprojw, N, C, C, accumulate);
        if (ring_)
            ring_->backward(wide, dln, a.atty, a.lse, a.qkv);
        else
            attention_backward(dev, attention, wide, scratch, dln, a.atty, a.lse, a.att, a.qkv, B, T, NH, HS);
        if (recompute >= 2) layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N, C);
        qkv_bias_backward(dev, g.qkvb, scratch, wide, g.attprojb, w.attprojw, N, C);
        matmul_backward(dev, dln, g.qkvw, wide, a.ln1, w.qkvw, N, C, 3 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln1w, g.ln1b, bias_below, scratch, dln, residual, w.ln1w, a.ln1_mean,
                           a.ln1_rstd, N, C);
        if (sum_over_ranks && ranks.overlap) sum_gradients(l);
    }
    encoder_backward(dev, g.wte, g.wpe, scratch, dresidual, plan, B, T, C, positions());
    if (sum_over_ranks) sum_gradients(kNoLayer);
}

// Starts summing the gradients of a layer over the ranks, or with kNoLayer those of all tensors that do not go by
// layer.
template <class Dev, class X>
void GPT2<Dev, X>::sum_gradients(int layer) {
    Range range("sum gradients");
    const std::vector<ParamRange> own = share(ranks.rank);
    const int l = std::max(layer, 0);
    ranks.comm->fork();
    ranks.comm->group([&] {
        for (size_t i = 0; i < params.tensors.size(); i++) {
            const TensorSpec& t = params.tensors[i];
            if (by_layer(t, ranks.overlap) != (layer != kNoLayer)) continue;
            A* g = static_cast<A*>(grads.at(i, l));
            if (ranks.sharded)
                ranks.comm->reduce_scatter(buffers_.share + own[i].state(l), g, own[i].size);
            else
                ranks.comm->all_reduce(g, layer == kNoLayer ? t.elements() : t.size);
        }
    });
}

// Gathers the ranks' updated shares of the parameters on all ranks.
template <class Dev, class X>
void GPT2<Dev, X>::gather_parameters() {
    const std::vector<ParamRange> first = share(0);  // rank 0's pieces are where each tensor's begin
    ranks.comm->fork();
    ranks.comm->group([&] {
        for (const ParamRange& r : first)
            for (size_t p = 0; p < r.pieces; p++)
                ranks.comm->all_gather(static_cast<X*>(params.at(0)) + r.piece(p), r.size);
    });
    ranks.comm->join();
}

// ---------------------------------------------------------------------------------------------------------------------
// The step's pieces

template <class Dev, class X>
Positions GPT2<Dev, X>::positions() const {
    if (!ring_) return {};
    const Zigzag zigzag{ranks.context};
    const int chunk = T / 2;
    return {chunk, zigzag.chunk(ranks.context_rank(), 0) * chunk, zigzag.chunk(ranks.context_rank(), 1) * chunk};
}

// All ranks of a group read the same sequences, and each keeps its own tokens of them.
template <class Dev, class X>
void GPT2<Dev, X>::fill_batch(int* host, Loader& loader) const {
    if (ring_) {
        const size_t all = size_t(B) * sequence();
        std::vector<int> whole(2 * all);
        loader.next(whole.data(), whole.data() + all);
        const Positions at = positions();
        for (int part = 0; part < 2; part++)  // tokens, targets
            for (int b = 0; b < B; b++)
                for (int t = 0; t < T; t++)
                    host[part * rows_ + size_t(b) * T + t] = whole[part * all + size_t(b) * sequence() + at.of(t)];
    } else {
        loader.next(host, host + rows_);
    }
    if (training) encoder_plan(dev, host + 2 * rows_, host, rows_);
}

template <class Dev, class X>
void GPT2<Dev, X>::upload(const int* host, int micro_batches) {
    dev.upload(buffers_.batch, host, size_t(micro_batches) * batch_ints() * sizeof(int));
}

// The matmul weights need no zeros, because the first micro-batch overwrites their gradients.
template <class Dev, class X>
void GPT2<Dev, X>::clear_gradients() {
    size_t begin = 0;  // of the stretch of tensors to clear, in bytes
    const auto clear_until = [&](size_t end) {
        if (end > begin) dev.zero(grads.base + begin, end - begin);
    };
    for (size_t i = 0; i < grads.tensors.size(); i++) {
        if (!grads.tensors[i].matmul) continue;
        clear_until(grads.offsets[i]);
        begin = grads.offsets[i] + grads.tensors[i].elements() * sizeof(A);
    }
    clear_until(grads.bytes);
}

template <class Dev, class X>
void GPT2<Dev, X>::train_micro_batch(int i, bool sum_over_ranks) {
    const bool accumulate = i > 0;
    if (!accumulate) clear_gradients();
    forward(tokens(i), B, T);
    loss(targets(i), B, T, own_stats() + i, true, accumulate);
    backward(plan(i), accumulate, sum_over_ranks);
}

template <class Dev, class X>
void GPT2<Dev, X>::train_micro_batches() {
    Range range("forward and backward");
    const bool several = ranks.size > 1;
    graph_.run(dev, [&] {
        for (int i = 0; i < micro_steps; i++) train_micro_batch(i, several && i + 1 == micro_steps);
        if (!several) return;
        ranks.comm->all_gather(stats(), micro_steps);
        ranks.comm->join();
    });
}

template <class Dev, class X>
void GPT2<Dev, X>::evaluate_micro_batch(int i) {
    forward(tokens(i), B, T);
    loss(targets(i), B, T, own_stats() + i, false);
}

// Updates nothing if a loss or the gradient's norm is not finite. The caller sees that in stats[num_losses()]. If the
// optimizer is sharded, the whole norm is the norm of the shares' norms.
template <class Dev, class X>
void GPT2<Dev, X>::update(const AdamW& hyper) {
    Range range("update");
    A *norm = stats() + num_losses(), *norms = norm + 1;
    A* g = ranks.sharded ? buffers_.share : static_cast<A*>(grads.at(0));
    const size_t own = num_parameters / shards();
    if (ranks.sharded) dev.zero(g + own, kGate * sizeof(A));                  // else clear_gradients() did it
    reduce_sum(dev, g + own, buffers_.scratch, stats(), A(0), num_losses());  // the gate
    global_norm(dev, ranks.sharded ? norms + ranks.rank : norm, buffers_.scratch, g, own + kGate);
    if (ranks.sharded) {
        ranks.comm->fork();
        ranks.comm->all_gather(norms, 1);
        ranks.comm->join();
        global_norm(dev, norm, buffers_.scratch, norms, ranks.size);
    }
    const std::vector<ParamRange> r = share(ranks.rank);
    adamw_update(dev, static_cast<X*>(params.at(0)), master(), adam_m(), adam_v(), g, norm, r.data(),
                 static_cast<int>(r.size()), hyper);
    if (ranks.sharded) gather_parameters();
}

// ---------------------------------------------------------------------------------------------------------------------
// Parameters: random, or from a file

// A stateless generator. The same (seed, index) gives the same number on every machine and thread.
static uint64_t mix(uint64_t seed, uint64_t index) {
    return mix64(seed + (index + 1) * kGolden);
}
static double uniform(uint64_t seed, uint64_t index) {
    return static_cast<double>(mix(seed, index) >> 11) * 0x1p-53;
}  // [0, 1)
static double normal(uint64_t seed, uint64_t index) {  // Box–Muller
    const double u = uniform(seed, 2 * index), v = uniform(seed, 2 * index + 1);
    return std::sqrt(-2.0 * std::log(1.0 - u)) * std::cos(2.0 * M_PI * v);
}

// Uploads the values as X, and as this rank's share of the master weights. The host rounds them to X.
template <class Dev, class X>
void GPT2<Dev, X>::set_parameters(std::vector<A>& values) {
    if (master()) {
        std::vector<A> own(num_parameters / shards());
        for_each_piece(share(ranks.rank), num_parameters, shards(), 1,
                       [&](size_t at, size_t state, size_t n) { std::copy_n(&values[at], n, &own[state]); });
        dev.upload(master(), own.data(), own.size() * sizeof(A));
        dev.sync();
    }
    if constexpr (has_master) {
        std::vector<X> rounded(num_parameters);
#pragma omp parallel for
        for (size_t i = 0; i < num_parameters; i++) rounded[i] = static_cast<X>(values[i]);
        dev.upload(params.base, rounded.data(), params.bytes);
        dev.sync();
    } else {
        dev.upload(params.base, values.data(), params.bytes);
        dev.sync();
    }
}

// GPT-2's initialisation (Radford et al. 2019, §2.3). Weights are normal with σ = 0.02, scaled by 1/√(2L) in the two
// projections into the residual stream. Biases are 0 and layer norm weights 1. Padding rows of wte are 0.
template <class Dev, class X>
void GPT2<Dev, X>::init_random(uint64_t seed) {
    std::vector<A> values(num_parameters);
    size_t at = 0;
    for (const TensorSpec& t : params.tensors) {
        const std::string name = t.name;
        const bool projection = name == "attprojw" || name == "fcprojw",
                   norm_weight = name[0] == 'l' && name.back() == 'w';
        const double sigma = 0.02 / (projection ? std::sqrt(2.0 * config.L) : 1.0);
        const size_t used = name == "wte" ? size_t(config.V) * config.C : t.elements();
#pragma omp parallel for
        for (size_t i = 0; i < used; i++)
            values[at + i] = static_cast<A>(t.decay ? sigma * normal(seed, at + i) : norm_weight ? 1.0 : 0.0);
        at += t.elements();
    }
    set_parameters(values);
}

template <class Dev, class X>
void GPT2<Dev, X>::load(const std::string& path) {
    const ModelHeader header = read_model_header(path);
    std::vector<A> values(num_parameters);
    auto read_as = [&](auto type) {
        std::vector<decltype(type)> raw(num_parameters);
        read_model_parameters(path, header, raw.data());
        for (size_t i = 0; i < num_parameters; i++) values[i] = static_cast<A>(static_cast<float>(raw[i]));
    };
    if (header.dtype == DType::bf16)
        read_as(bf16{});
    else
        read_as(float{});
    set_parameters(values);
}

// ---------------------------------------------------------------------------------------------------------------------
// If a loss is not finite, this runs the step again, micro-batch by micro-batch, and names the first tensor in the
// order of computation.

template <class Dev, class X>
std::string GPT2<Dev, X>::count_in(const Arena& arena, size_t i, int l) {
    const TensorSpec& t = arena.tensors[i];
    if (t.elements() == 0) return "";
    const size_t bad = t.dtype == dtype_of<X>()
                           ? count_nonfinite(dev, buffers_.scratch, static_cast<const X*>(arena.at(i, l)), t.size)
                           : count_nonfinite(dev, buffers_.scratch, static_cast<const A*>(arena.at(i, l)), t.size);
    if (bad == 0) return "";
    const std::string layer = t.layers > 0 ? format(" of layer %d", l) : "";
    return format("%s%s (%s, %zu of %zu elements)", t.name, layer.c_str(), arena.name, bad, t.size);
}

constexpr char kNoneFound[] = "none on a second run";

// An arena's tensors in the order of computation: those before the layers, then layer by layer, then those after them.
static std::vector<std::pair<size_t, int>> computation_order(const Arena& arena, int layers) {
    size_t first = 0, last = arena.tensors.size();
    while (first < last && arena.tensors[first].layers == 0) first++;
    while (last > first && arena.tensors[last - 1].layers == 0) last--;
    std::vector<std::pair<size_t, int>> order;
    for (size_t i = 0; i < first; i++) order.push_back({i, 0});
    for (int l = 0; l < layers; l++)
        for (size_t i = first; i < last; i++)
            if (arena.tensors[i].layers != TensorSpec::kShared) order.push_back({i, l});
    for (size_t i = last; i < arena.tensors.size(); i++) order.push_back({i, 0});
    return order;
}

template <class Dev, class X>
std::string GPT2<Dev, X>::first_nonfinite() {
    auto search = [&](const Arena& arena, bool backwards) -> std::string {
        auto order = computation_order(arena, config.L);
        if (backwards) std::reverse(order.begin(), order.end());
        for (const auto& [i, l] : order)
            if (const std::string found = count_in(arena, i, l); !found.empty()) return found;
        return "";
    };
    std::string found = search(params, false);
    // No rank of a ring may stop before the others do.
    for (int i = 0; i < micro_steps && (found.empty() || ring_); i++) {
        evaluate_micro_batch(i);
        if (found.empty()) found = search(acts, false);
        if (!found.empty() && !ring_) break;
        train_micro_batch(i);
        if (found.empty()) found = search(grads, true);
    }
    return found.empty() ? kNoneFound : found;
}

// =====================================================================================================================
// Sampling

struct Sampling {
    float temperature = 1.f;
    int top_k = 0;  // 0: all
};

// Logits of the token after `context`, whose last T tokens the model sees.
template <class Dev, class X>
std::vector<float> GPT2<Dev, X>::logits_of_last(const std::vector<int>& context) {
    const int used = static_cast<int>(std::min<size_t>(context.size(), T));
    // Rounds t up so that matmul plans are reused from token to token. The last token cannot see what follows it.
    const int t = std::min((used + 63) / 64 * 64, T);
    std::vector<int> padded(t, 0);
    std::copy(context.end() - used, context.end(), padded.begin());
    dev.upload(buffers_.batch, padded.data(), padded.size() * sizeof(int));
    forward(buffers_.batch, 1, t, true);
    matmul_forward<X>(dev, buffers_.logits, activations().lnf + size_t(used - 1) * config.C, weights().wte, nullptr, 1,
                      config.C, config.Vp);
    std::vector<X> row(config.Vp);
    dev.download(row.data(), buffers_.logits, row.size() * sizeof(X));
    std::vector<float> logits(config.V);
    for (int v = 0; v < config.V; v++) logits[v] = static_cast<float>(row[v]);
    return logits;
}

// Draws a token from softmax(logits / temperature) over the top_k largest, with the uniform number u. Temperature 0
// takes the largest.
static int sample_token(const std::vector<float>& logits, const Sampling& s, double u) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t k = s.top_k > 0 ? std::min<size_t>(s.top_k, order.size()) : order.size();
    auto larger = [&](int x, int y) { return logits[x] != logits[y] ? logits[x] > logits[y] : x < y; };
    if (s.temperature <= 0) return *std::min_element(order.begin(), order.end(), larger);
    if (k < order.size()) std::partial_sort(order.begin(), order.begin() + k, order.end(), larger);
    order.resize(k);
    const float top = logits[*std::min_element(order.begin(), order.end(), larger)];
    std::vector<double> cumulative;
    double sum = 0;
    for (int v : order) cumulative.push_back(sum += std::exp((static_cast<double>(logits[v]) - top) / s.temperature));
    const size_t i = std::lower_bound(cumulative.begin(), cumulative.end(), u * sum) - cumulative.begin();
    return order[std::min(i, k - 1)];
}

static bool can_generate(const Config& config) {
    return config.V == kByteVocab || config.V > kEndOfText;
}

// Continues `prompt` (which <|endoftext|> precedes) by up to n tokens, ending at the next <|endoftext|>.
template <class Dev, class X>
std::string generate(GPT2<Dev, X>& model, const Tokenizer& tokenizer, const std::string& prompt, int n,
                     const Sampling& s, uint64_t seed) {
    Range range("sample");
    const int end = model.config.V == kByteVocab ? kByteEndOfText : kEndOfText;
    if (!can_generate(model.config))
        throw Error(
            format("a model with a vocabulary of %d has no <|endoftext|> to start from: %d or at least %d tokens",
                   model.config.V, kByteVocab, kEndOfText + 1));
    std::vector<int> context = {end};
    for (int token : encode_bytes(prompt)) context.push_back(token);
    std::string text = prompt;
    for (int i = 0; i < n; i++) {
        const int token = sample_token(model.logits_of_last(context), s, uniform(seed, i));
        if (token == end) break;
        context.push_back(token);
        text += tokenizer.decode(token);
    }
    return text;
}

// =====================================================================================================================
// Evaluation

struct Validation {
    double loss;
    uint64_t batches;
};

// Mean loss over the loader's first `batches` batches, or over all whole ones if it is 0 or too large. Each rank
// evaluates its share of them. Their losses are summed in the order of the batches, so that the sum does not depend on
// the number of ranks. Ranks that share sequences have the same batches, and each adds its tokens' part of their mean.
template <class Dev, class X>
Validation validate(GPT2<Dev, X>& model, Loader& loader, uint64_t batches, Job& job) {
    const Ranks<Dev>& ranks = model.ranks;
    Range range("validate");
    loader.reset();
    std::vector<int> host(model.batch_ints());
    const uint64_t all = loader.batches_per_epoch();
    if (batches == 0 || batches > all) batches = all;
    std::vector<double> losses(batches);
    for (uint64_t i = 0; i < batches; i++) {
        if (i % ranks.groups() != uint64_t(ranks.group())) {
            loader.skip(1);
            continue;
        }
        Acc<X> loss;
        model.fill_batch(host.data(), loader);
        model.upload(host.data(), 1);
        model.evaluate_micro_batch(0);
        model.dev.download(&loss, model.own_stats(), sizeof loss);
        losses[i] = loss / ranks.context;
    }
    job.sum(losses);
    return {std::accumulate(losses.begin(), losses.end(), 0.0) / batches, batches};
}

// losses[i][e] is the mean loss of the tokens of ending e of choice i after its context. The model's answer is the
// ending with the lowest.
template <class Dev, class X>
std::vector<std::vector<double>> ending_losses(GPT2<Dev, X>& model, const std::vector<Choice>& choices, Job& job) {
    Range range("multiple choice");
    const size_t B = model.B, T = model.T, N = B * T;
    std::vector<std::pair<size_t, size_t>> rows;  // choice and ending of each row of a batch
    std::vector<std::vector<double>> losses(choices.size());
    for (size_t i = 0; i < choices.size(); i++) {
        losses[i].resize(choices[i].endings.size());
        for (size_t e = 0; e < losses[i].size(); e++) rows.push_back({i, e});
    }
    std::vector<int> host(model.batch_ints());
    std::vector<Acc<X>> position(N);
    for (size_t first = 0; first < rows.size(); first += B) {
        if (first / B % job.size != size_t(job.rank)) continue;
        const size_t last = std::min(first + B, rows.size());
        std::fill(host.begin(), host.end(), 0);
        for (size_t r = first; r < last; r++) {
            const Choice& c = choices[rows[r].first];
            std::vector<int> text = c.context;
            text.insert(text.end(), c.endings[rows[r].second].begin(), c.endings[rows[r].second].end());
            std::copy(text.begin(), text.end() - 1, host.begin() + (r - first) * T);
            std::copy(text.begin() + 1, text.end(), host.begin() + N + (r - first) * T);
        }
        model.upload(host.data(), 1);
        model.evaluate_micro_batch(0);
        model.dev.download(position.data(), model.losses(), N * sizeof(Acc<X>));
        for (size_t r = first; r < last; r++) {
            const auto [i, e] = rows[r];
            const size_t begin = (r - first) * T + choices[i].context.size() - 1, n = choices[i].endings[e].size();
            losses[i][e] = std::accumulate(position.begin() + begin, position.begin() + begin + n, 0.0) / n;
        }
    }
    if (job.size > 1)  // what another rank computed is 0 here
        for (std::vector<double>& of_choice : losses) job.sum(of_choice);
    return losses;
}
static int answer(const std::vector<double>& losses) {
    return static_cast<int>(std::min_element(losses.begin(), losses.end()) - losses.begin());
}
static int count_correct(const std::vector<std::vector<double>>& losses, const std::vector<Choice>& choices) {
    int correct = 0;
    for (size_t i = 0; i < choices.size(); i++) correct += answer(losses[i]) == choices[i].label;
    return correct;
}

// =====================================================================================================================
// The run: options, schedule, checkpoints, loop

struct Options {
    std::string train_data, val_data, init = "auto", output_dir, tokenizer;
    int B = 0, T = 0, tokens_per_step = 0, max_steps = -1, seed = 1;
    float lr = 0, final_lr = 0.1f, weight_decay = 0.1f, max_norm = 1.f, beta2 = 0.95f;
    int warmup = -1;
    std::string schedule = "cosine";
    int val_every = -1, val_batches = 0, sample_every = -1, sample_length = 700;
    std::string hellaswag;
    bool eval_only = false;
    int checkpoint_every = 0, keep = 0;
    bool resume = false, overfit = false, no_tf32 = false, no_graph = false, no_shuffle = false, memory = false;
    int profile = 0;
    std::string precision = "auto", attention = "flash", device = "auto";
    int recompute = 1;
    int gpus = 0, zero = -1, overlap = -1, context_parallel = 1;
    int generate = 0, top_k = 0;
    std::string prompt;
    float temperature = 1.f;

    std::vector<Option> table();
    double learning_rate(int step) const;  // of the step that starts after `step` steps
};

std::vector<Option> Options::table() {
    using O = Option;
    return {
        {"--train-data", "-i", O::String, &train_data,
         "token shards (a glob) or a text file; default: the built-in corpus, kept in data/cache", "", "data"},
        {"--val-data", "-j", O::String, &val_data, "the same for validation; default: none with -i", "", "data"},
        {"--init", "-e", O::String, &init, "d12, d24, d36, d48, tiny, or an llm.c checkpoint; auto: d12 (CPU: tiny)",
         "", "model"},
        {"--precision", "", O::Choice, &precision, "auto: bf16 where the GPU has it, else fp32", "auto|bf16|fp32",
         "model"},
        {"--attention", "", O::Choice, &attention, "naive materialises T×T", "flash|naive", "model"},
        {"--device", "", O::Choice, &device, "auto: the GPU if there is one", "auto|cuda|cpu", "model"},
        {"--no-graph", "", O::Flag, &no_graph, "launch kernels one by one, not as a CUDA graph (for profilers)", "",
         "model"},
        {"--recompute", "-r", O::Int, &recompute,
         "memory for time: keep 1: no GELU output (1 % slower), 2: no layer norm output either (2 %)", "0..2", "model"},
        {"--no-tf32", "", O::Flag, &no_tf32, "strict fp32 matmuls (they use TF32 otherwise)", "", "model"},
        {"--gpus", "", O::Int, &gpus,
         "train on so many GPUs of this machine, a process each (with --device cpu: so many processes); 0: one, or as "
         "torchrun, srun or mpirun started us",
         "0..1024", "several GPUs"},
        {"--zero", "", O::Int, &zero,
         "1: divide the optimizer's state and its work among the ranks; 0: don't; -1: where channels divide", "-1..1",
         "several GPUs"},
        {"--overlap", "", O::Int, &overlap,
         "add up gradients 1: a layer at a time beside backward; 0: all after it; -1: 1 between machines", "-1..1",
         "several GPUs"},
        {"--context-parallel", "", O::Int, &context_parallel,
         "divide each sequence among so many GPUs (ring attention), for T beyond the memory of one", "1..1024",
         "several GPUs"},
        {"--batch", "-b", O::Int, &B, "sequences per micro-batch and GPU; 0: 8 (CPU: 4)", "0..65536", "batch"},
        {"--tokens", "-t", O::Int, &T, "tokens per sequence; 0: at most 1024 (CPU: 64) of the model's positions",
         "0..4194304", "batch"},
        {"--tokens-per-step", "-d", O::Int, &tokens_per_step,
         "tokens per update, on all GPUs together, a multiple of B·T·GPUs / context-parallel; 0: that", "0..", "batch"},
        {"--max-steps", "-x", O::Int, &max_steps,
         "steps; -1: about two minutes on an H200 (CPU: one minute), or one epoch of -i", "-1..", "batch"},
        {"--no-shuffle", "", O::Flag, &no_shuffle, "read the training data in order", "", "batch"},
        {"--overfit", "-a", O::Flag, &overfit, "train on the first batch again and again", "", "batch"},
        {"--lr", "-l", O::Float, &lr, "learning rate; 0: 3e-4 (tiny: 2e-3)", "0..", "optimizer"},
        {"--warmup", "-u", O::Int, &warmup, "warm-up steps; -1: a twentieth of all, but 50 of a short run", "-1..",
         "optimizer"},
        {"--final-lr", "-q", O::Float, &final_lr, "learning rate at the end, as a fraction", "0..1", "optimizer"},
        {"--schedule", "-k", O::Choice, &schedule, "wsd: constant, then linear over the last fifth",
         "cosine|linear|constant|wsd", "optimizer"},
        {"--weight-decay", "-c", O::Float, &weight_decay, "on matrices only", "0..", "optimizer"},
        {"--beta2", "", O::Float, &beta2, "AdamW's second decay", "0..0.99999", "optimizer"},
        {"--max-norm", "", O::Float, &max_norm, "clip the gradient's norm; 0: don't", "0..", "optimizer"},
        {"--seed", "", O::Int, &seed, "of initial weights, order of data, rounding and samples", "0..", "optimizer"},
        {"--val-every", "-v", O::Int, &val_every, "steps between validations; 0: never, -1: ten in the run", "-1..",
         "watching"},
        {"--val-batches", "-m", O::Int, &val_batches, "micro-batches per validation; 0: 20 (--eval-only: all)", "0..",
         "watching"},
        {"--hellaswag", "", O::String, &hellaswag, "with each validation, answer the questions of this file", "",
         "watching"},
        {"--eval-only", "", O::Flag, &eval_only, "validate the model of -e on -j, then exit", "", "watching"},
        {"--sample-every", "-s", O::Int, &sample_every, "steps between samples; 0: never, -1: five in the run", "-1..",
         "watching"},
        {"--sample-length", "-g", O::Int, &sample_length, "tokens per sample, at most", "1..", "watching"},
        {"--memory", "", O::Flag, &memory, "print the bytes of every tensor, then exit", "", "watching"},
        {"--profile", "", O::Int, &profile, "after five steps, so many inside cudaProfilerStart and Stop, then exit",
         "0..", "watching"},
        {"--output-dir", "-o", O::String, &output_dir, "log.jsonl and checkpoints go here; default: nothing is written",
         "", "files"},
        {"--checkpoint-every", "-n", O::Int, &checkpoint_every,
         "steps between checkpoints; 0: only at the end and when interrupted", "0..", "files"},
        {"--keep", "-nk", O::Int, &keep, "keep only so many checkpoints; 0: all", "0..", "files"},
        {"--resume", "-y", O::Flag, &resume, "go on from the newest checkpoint in -o", "", "files"},
        {"--tokenizer", "", O::String, &tokenizer, "llm.c's tokenizer file, to print samples of BPE models", "",
         "files"},
        {"--generate", "", O::Int, &generate, "write so many tokens with the model of -e, then exit", "0..",
         "generating"},
        {"--prompt", "", O::String, &prompt, "text to continue", "", "generating"},
        {"--temperature", "", O::Float, &temperature, "0: always the likeliest token", "0..", "generating"},
        {"--top-k", "", O::Int, &top_k, "choose among the k likeliest; 0: all", "0..", "generating"},
    };
}

// Warm-up is linear and reaches the full rate at step `warmup`. Then --schedule takes it to final_lr·lr at the last
// step.
double Options::learning_rate(int step) const {
    if (step < warmup) return lr * (step + 1.0) / warmup;
    const double left = max_steps - warmup, at = left > 1 ? (step - warmup) / (left - 1) : 0;  // 0..1
    double factor = 1;
    if (schedule == "cosine")
        factor = 0.5 * (1 + std::cos(M_PI * std::min(at, 1.0)));
    else if (schedule == "linear")
        factor = 1 - std::min(at, 1.0);
    else if (schedule == "wsd")
        factor = at < 0.8 ? 1 : std::max(0.0, (1 - at) / 0.2);
    return lr * (final_lr + (1 - final_lr) * factor);
}

// SIGINT and SIGTERM finish the step, write a checkpoint and leave. A second one ends the program at once if it comes
// more than a second later. Within a second it counts as the same signal, because many programs that pass signals on
// send them to a process and to its group.
static volatile std::sig_atomic_t g_signal = 0;
static timespec g_signal_time;
static void on_signal(int signal) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!g_signal) {
        g_signal_time = now, g_signal = signal;
    } else if (now.tv_sec - g_signal_time.tv_sec + (now.tv_nsec - g_signal_time.tv_nsec) * 1e-9 > 1) {
        std::signal(signal, SIG_DFL);
        raise(signal);
    }
}

// A rank without progress for this long counts as hung: in an ordinary step, and in one whose length is not known yet.
constexpr double kStallSeconds = 45, kLongStallSeconds = 300;

// Where the data comes from, and the loss that no model can beat, if that is known.
struct Data {
    std::string train, val;
    double floor = NAN;  // nats per token of the validation data
};
static Data find_data(const Options& o) {
    if (!o.train_data.empty()) return {o.train_data, o.val_data};
    const Corpus corpus = builtin_corpus("data/cache");
    if (!o.val_data.empty()) return {corpus.train_path, o.val_data};
    return {corpus.train_path, corpus.val_path, corpus.val_nats};
}

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;

// Prints every tensor's size, and for what grows with the batch also the bytes that one token adds.
template <class Dev, class X>
void print_memory_table(GPT2<Dev, X>& model) {
    const double tokens = static_cast<double>(model.B) * model.T;
    std::printf("%-12s %-10s %-5s %6s %14s %12s %14s\n", "arena", "tensor", "dtype", "layers", "elements", "MiB",
                "bytes/token");
    for (const Arena* a : model.arenas())
        for (const TensorSpec& t : a->tensors) {
            const double bytes = static_cast<double>(t.elements() * size_of(t.dtype));
            const std::string per_token = a == &model.acts ? format("%.1f", bytes / tokens) : "";
            if (bytes > 0)
                std::printf("%-12s %-10s %-5s %6d %14zu %12.2f %14s\n", a->name, t.name, name_of(t.dtype),
                            std::max(t.layers, 0), t.elements(), bytes / kMiB, per_token.c_str());
        }
    std::printf("%-44s %26.2f %14.1f\n", "total, and activations per token", model.total_bytes() / kMiB,
                model.acts.bytes / tokens);
}

// Says what each arena asked for and the largest -b that would fit in what is free.
template <class Dev, class X>
[[noreturn]] void throw_out_of_memory(GPT2<Dev, X>& model, size_t free_bytes) {
    std::string asked;
    for (const Arena* a : model.arenas())
        if (a->bytes) asked += format("%s%s %.2f", asked.empty() ? "" : ", ", a->name, a->bytes / kGiB);
    auto bytes_with = [&](int b) {
        return GPT2<Dev, X>(model.dev, model.config, model.attention, b, model.T, 1, model.training, model.recompute,
                            model.ranks)
            .total_bytes();
    };
    int b = model.B - 1;
    while (b > 0 && bytes_with(b) > free_bytes) b--;
    std::string way_out =
        b > 0 ? format("-b %d would fit", b)
              : "not even -b 1 fits: use a smaller -t, a smaller model, or more GPUs with --context-parallel";
    if (model.training && model.recompute < 2) way_out += "; --recompute 2 needs less";
    throw OutOfMemory(format("%s has %.2f GiB free, the model needs %.2f GiB at B=%d T=%d (%s): %s",
                             model.dev.name.c_str(), free_bytes / kGiB, model.total_bytes() / kGiB, model.B,
                             model.sequence(), asked.c_str(), way_out.c_str()));
}

template <class Dev, class X>
void allocate_or_explain(GPT2<Dev, X>& model) {
    const size_t free_bytes = model.dev.free_bytes();
    if (model.total_bytes() > free_bytes) throw_out_of_memory(model, free_bytes);
    try {
        model.allocate();
    } catch (const OutOfMemory&) {
        throw_out_of_memory(model, free_bytes - free_bytes / 20);
    }
}

// A training run: the model and all that accompanies it from step to step.
template <class Dev, class X>
class Run {
  public:
    Run(const Dev& dev, const Options& o, GPT2<Dev, X>& model, const Data& data, Job& job);
    ~Run() { dev.free_host(host); }

    void describe() const;
    void open_log();
    void train_step();
    void watch();    // validation and samples, if they are due after this step
    void save();     // a checkpoint of this step
    bool restore();  // the newest checkpoint, false if there is none
    bool saved() const { return last_checkpoint == step; }
    int interrupted() const { return job.size == 1 ? int(g_signal) : signal; }  // by which signal, to any rank
    uint64_t train_tokens() const { return train.num_tokens(); }
    uint64_t val_identity() const { return val ? val->identity() : 0; }
    const Identity& run_identity() const { return identity; }
    int step = 0;  // steps done

  private:
    using A = Acc<X>;
    const Dev& dev;
    const Options& o;
    GPT2<Dev, X>& model;
    const Data data;
    Job& job;
    Loader train;
    std::unique_ptr<Loader> val;
    const Tokenizer tokenizer;
    std::vector<Choice> choices;
    Identity identity;
    std::unique_ptr<Log> log = std::make_unique<Log>();
    int last_checkpoint = -1, signal = 0;
    double mean_ms = 0;

    // Batches of two steps, pinned. The GPU works on one while the other is prepared. The training data continues at
    // `position` after the first of them.
    int *host = nullptr, *batch = nullptr, *next = nullptr;
    bool prepared = false;
    std::exception_ptr late_error;  // thrown while `next` was prepared
    LoaderState position{};
    void prepare(int* to) {  // group r of n takes micro-batches r, r + n, … of the step
        for (int i = 0; i < model.micro_steps; i++) {
            train.skip(model.ranks.group());
            model.fill_batch(to + i * model.batch_ints(), train);
            train.skip(model.ranks.groups() - 1 - model.ranks.group());
        }
    }
    void copy_share(int r, std::vector<char>& whole, std::vector<char>& share, bool to_whole) const;
    std::vector<char> gather_optimizer();
    void scatter_optimizer(std::vector<char>& whole);

    // The parts of a checkpoint beside the model, for reading and for writing.
    struct Counters {
        uint64_t step, model_checksum;
        LoaderState train;
    };
    static std::vector<Section> sections(Counters& counters, std::vector<char>& adam) {
        return {{"counters", &counters, sizeof counters}, {"optimizer", adam.data(), adam.size()}};
    }
    void read_checkpoint(int newest, Counters& counters, std::vector<char>& adam, std::vector<char>& params);
    std::string first_nonfinite();
    int first_step = 0;  // of this process
};

template <class Dev, class X>
Run<Dev, X>::Run(const Dev& dev, const Options& o, GPT2<Dev, X>& model, const Data& data, Job& job)
    : dev(dev),
      o(o),
      model(model),
      data(data),
      job(job),
      train(data.train, o.B, o.T, model.config.V, !o.no_shuffle, o.seed),
      tokenizer(o.tokenizer.empty() ? Tokenizer() : Tokenizer(o.tokenizer)) {
    const Config& c = model.config;
    if (!data.val.empty()) val = std::make_unique<Loader>(data.val, o.B, o.T, c.V, false, 0);
    if (!o.hellaswag.empty()) choices = read_choices(o.hellaswag, c.V, o.T);
    const size_t ints = size_t(model.micro_steps) * model.batch_ints();
    host = static_cast<int*>(dev.alloc_host(2 * ints * sizeof(int)));
    batch = host, next = host + ints;
    identity.fields = {{"model", format("L=%d NH=%d C=%d V=%d", c.L, c.NH, c.C, c.V)},
                       {"precision", name_of(dtype_of<X>())},
                       {"device", Dev::kind},
                       {"B", std::to_string(o.B)},
                       {"T", std::to_string(o.T)},
                       {"tokens per step", std::to_string(o.tokens_per_step)},
                       {"seed", std::to_string(o.seed)},
                       {"order of data", o.overfit      ? "one batch"
                                         : o.no_shuffle ? "as it is"
                                                        : "shuffled"},
                       {"attention", o.attention},
                       {"matmuls", dev.tf32 && std::is_same_v<X, float> ? "TF32" : "full precision"},
                       {"data", format("%016llx", static_cast<unsigned long long>(train.identity()))}};
}

template <class Dev, class X>
void Run<Dev, X>::describe() const {
    const Config& c = model.config;
    Options settings = o;
    std::printf("%s", options_settings(settings.table()).c_str());
    std::printf("device             %s, %s%s\n", dev.name.c_str(), name_of(dtype_of<X>()),
                dev.tf32 && std::is_same_v<X, float> ? " with TF32 matmuls" : "");
    if (job.size > 1)
        std::printf("ranks              %d, %d on this machine, optimizer %s, gradients summed %s backward%s\n",
                    job.size, job.local_size, model.ranks.sharded ? "divided among them" : "on each",
                    model.ranks.overlap ? "beside" : "after",
                    model.ranks.context > 1 ? format(", sequences divided among %d", model.ranks.context).c_str() : "");
    std::printf("model              %d layers, %d heads, %d channels, %d positions, vocabulary %d (padded %d)\n", c.L,
                c.NH, c.C, c.max_T, c.V, c.Vp);
    std::printf("parameters         %.1f M\n", model.num_parameters / 1e6);
    std::printf("train data         %s\n", train.description().c_str());
    if (val) std::printf("validation data    %s\n", val->description().c_str());
    std::printf("memory\n");
    for (const Arena* a : model.arenas())
        if (a->bytes) std::printf("  %-16s %9.1f MiB\n", a->name, a->bytes / kMiB);
    std::printf("  %-16s %9.1f MiB\n", "total", model.total_bytes() / kMiB);
}

// A fresh run starts a new log, also if -y found no checkpoint. A resumed run drops the rows that it will write again.
template <class Dev, class X>
void Run<Dev, X>::open_log() {
    if (o.output_dir.empty() || job.rank > 0) return;
    const std::string path = o.output_dir + "/log.jsonl";
    if (step > 0) Log::truncate_after(path, step);
    log = std::make_unique<Log>(path, step > 0);
    Row row("run");
    row.add("device", dev.name).add("precision", name_of(dtype_of<X>())).add("attention", o.attention);
    row.add("parameters", static_cast<long long>(model.num_parameters)).add("B", o.B).add("T", o.T);
    row.add("tokens_per_step", o.tokens_per_step).add("steps", o.max_steps).add("seed", o.seed).add("gpus", job.size);
    row.add("context_parallel", model.ranks.context);
    log->write(row.add("floor_nats", data.floor));
}

template <class Dev, class X>
void Run<Dev, X>::train_step() {
    Range range("step", step);
    const auto start = std::chrono::steady_clock::now();
    if (late_error) std::rethrow_exception(late_error);
    if (!prepared) prepare(batch);
    prepared = true;
    const bool usual = step > first_step + 1;  // the first steps make plans and connections
    job.expect_progress(usual ? std::max(kStallSeconds, 5 * mean_ms / 1e3) : kLongStallSeconds);
    model.upload(batch, model.micro_steps);
    model.train_micro_batches();
    const double lr = o.learning_rate(step);
    model.update(
        {static_cast<float>(lr), 0.9f, o.beta2, 1e-8f, o.weight_decay, o.max_norm, step + 1, uint64_t(o.seed)});
    const bool another = !o.overfit && step + 1 < o.max_steps;
    if (!o.overfit) position = train.state();
    if (another) {
        try {
            prepare(next);  // while the GPU works
        } catch (...) {
            late_error = std::current_exception();
        }  // this step's result comes first
    }
    // This too runs while the GPU works. A signal to one rank becomes one to all, at the same step.
    if (job.size > 1)
        for (int s : job.all_gather(int(g_signal))) signal = std::max(signal, s);

    std::vector<A> stats(model.num_losses() + 1);
    dev.download(stats.data(), model.stats(), stats.size() * sizeof(A));
    job.expect_progress(kLongStallSeconds);
    double loss = 0;  // in the order of the data, whichever rank had it
    for (int i = 0; i < model.micro_steps; i++)
        for (int r = 0; r < job.size; r++) loss += stats[r * model.micro_steps + i];
    loss /= model.num_losses();
    const double norm = stats.back();
    if (!std::isfinite(loss) || !std::isfinite(norm)) {
        const std::string last_good = last_checkpoint < 0 ? "none" : state_path(o.output_dir, last_checkpoint);
        throw Error(
            format("step %d: loss %g, gradient norm %g; first tensor that is not finite: %s; nothing was updated; last "
                   "good checkpoint: %s; a lower -l or a longer -u may help",
                   step + 1, loss, norm, first_nonfinite().c_str(), last_good.c_str()));
    }
    if (another) std::swap(batch, next);
    step++;

    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    mean_ms = mean_ms == 0 ? ms : 0.95 * mean_ms + 0.05 * ms;
    const double tok_s = o.tokens_per_step / ms * 1e3, peak = peak_tflops(dev.name, std::is_same_v<X, bf16>, dev.tf32);
    const double mfu = mfu_percent(model.config, o.T, tok_s, job.size, peak);
    const int eta = static_cast<int>((o.max_steps - step) * mean_ms / 1e3);
    std::printf("step %d/%d | loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU %s | ETA %d:%02d\n", step,
                o.max_steps, loss, norm, lr, ms, tok_s, peak > 0 ? format("%.1f%%", mfu).c_str() : "n/a", eta / 60,
                eta % 60);
    Row row("train");
    row.add("step", step).add("loss_nats", loss).add("grad_norm", norm).add("lr", lr);
    log->write(row.add("step_ms", ms).add("tokens_per_s", tok_s).add("mfu_percent", mfu));
}

template <class Dev, class X>
void Run<Dev, X>::watch() {
    auto due = [&](int every) { return every > 0 && (step % every == 0 || step == o.max_steps); };
    if (val && due(o.val_every)) {
        const double loss = validate(model, *val, o.val_batches, job).loss;
        const std::string floor = std::isnan(data.floor) ? "" : format(" | floor %.4f", data.floor);
        std::printf("step %d/%d | val loss %.4f%s\n", step, o.max_steps, loss, floor.c_str());
        log->write(Row("val").add("step", step).add("loss_nats", loss).add("floor_nats", data.floor));
    }
    if (!choices.empty() && due(o.val_every)) {
        const int correct = count_correct(ending_losses(model, choices, job), choices);
        std::printf("step %d/%d | hellaswag %d of %zu, %.2f%%\n", step, o.max_steps, correct, choices.size(),
                    100.0 * correct / choices.size());
        Row row("hellaswag");
        log->write(row.add("step", step).add("correct", correct).add("examples", static_cast<int>(choices.size())));
    }
    if (step > 0 && due(o.sample_every) && job.rank == 0) {  // the others wait at the next step
        const Sampling sampling = {o.temperature, o.top_k};
        const std::string text = generate(model, tokenizer, o.prompt, o.sample_length, sampling, mix(o.seed, step));
        std::printf("step %d/%d | sample\n---\n%s\n---\n", step, o.max_steps, for_terminal(text).c_str());
        log->write(Row("sample").add("step", step).add("text", text));
    }
}

// Copies rank r's share of the optimizer's state from or to its places in the whole.
template <class Dev, class X>
void Run<Dev, X>::copy_share(int r, std::vector<char>& whole, std::vector<char>& share, bool to_whole) const {
    const size_t arrays = model.has_master ? 3 : 2;
    for_each_piece(model.share(r), model.num_parameters, job.size, arrays, [&](size_t at, size_t state, size_t n) {
        char *in_whole = whole.data() + at * sizeof(A), *in_share = share.data() + state * sizeof(A);
        std::memcpy(to_whole ? in_whole : in_share, to_whole ? in_share : in_whole, n * sizeof(A));
    });
}

// Puts the optimizer's state together on rank 0 as a single rank would have it: m, v and master, each in the order of
// the parameters. So a checkpoint's contents do not depend on the number of ranks.
template <class Dev, class X>
std::vector<char> Run<Dev, X>::gather_optimizer() {
    std::vector<char> own(model.adam.bytes);
    dev.download(own.data(), model.adam.base, own.size());
    if (!model.ranks.sharded) return own;
    if (job.rank > 0) return job.exchange({{0, own.data(), own.size(), nullptr, 0}}), std::vector<char>();
    std::vector<char> whole(own.size() * job.size);
    for (int r = 0; r < job.size; r++) {
        if (r > 0) job.exchange({{r, nullptr, 0, own.data(), own.size()}});
        copy_share(r, whole, own, true);
    }
    return whole;
}

// The other way round, from rank 0 to all.
template <class Dev, class X>
void Run<Dev, X>::scatter_optimizer(std::vector<char>& whole) {
    std::vector<char> own(model.adam.bytes);
    if (!model.ranks.sharded) {
        own = std::move(whole);
        own.resize(model.adam.bytes);
        job.broadcast(own.data(), own.size());
    } else if (job.rank > 0) {
        job.exchange({{0, nullptr, 0, own.data(), own.size()}});
    } else {
        for (int r = job.size - 1; r >= 0; r--) {  // our own comes last, because it stays in `own`
            copy_share(r, whole, own, false);
            if (r > 0) job.exchange({{r, own.data(), own.size(), nullptr, 0}});
        }
    }
    dev.upload(model.adam.base, own.data(), own.size());
    dev.sync();
}

template <class Dev, class X>
std::string Run<Dev, X>::first_nonfinite() {
    const std::vector<std::string> found = job.all_gather(model.first_nonfinite());
    for (int r = 0; r < job.size; r++)
        if (job.size > 1 && found[r] != kNoneFound) return format("%s on rank %d", found[r].c_str(), r);
    return found[0];
}

template <class Dev, class X>
void Run<Dev, X>::save() {
    Range range("checkpoint");
    job.expect_progress(0);  // a disk may take its time
    last_checkpoint = step;
    if (job.rank > 0 && !model.ranks.sharded) return;
    std::vector<char> adam = gather_optimizer();
    if (job.rank > 0) return;  // the others wait at the next step
    std::vector<char> params(model.params.bytes);
    dev.download(params.data(), model.params.base, params.size());
    Counters counters = {uint64_t(step), checksum64(params.data(), params.size()), position};
    write_model(model_path(o.output_dir, step), header_of(model.config, dtype_of<X>()), params.data());
    write_state(state_path(o.output_dir, step), identity, sections(counters, adam));
    std::printf("checkpoint %s (and model_%08d.bin)\n", state_path(o.output_dir, step).c_str(), step);
    if (o.keep > 0) prune_checkpoints(o.output_dir, o.keep);
}

// Rank 0 reads and sends, because the directory need not exist on other machines.
template <class Dev, class X>
bool Run<Dev, X>::restore() {
    int newest = job.rank == 0 ? newest_checkpoint(o.output_dir) : -1;
    job.broadcast(&newest, 1);
    if (newest < 0) return false;
    std::vector<char> adam, params(model.params.bytes);
    Counters counters{};
    if (job.rank == 0) read_checkpoint(newest, counters, adam, params);
    job.broadcast(&counters, 1);
    job.broadcast(params.data(), params.size());
    scatter_optimizer(adam);
    dev.upload(model.params.base, params.data(), params.size());
    dev.sync();
    train.restore(position = counters.train);
    last_checkpoint = step = first_step = newest;
    return true;
}

template <class Dev, class X>
void Run<Dev, X>::read_checkpoint(int newest, Counters& counters, std::vector<char>& adam, std::vector<char>& params) {
    const std::string path = model_path(o.output_dir, newest);
    adam.resize(model.adam.bytes * model.shards());
    read_state(state_path(o.output_dir, newest), identity, sections(counters, adam));
    const ModelHeader header = read_model_header(path), mine = header_of(model.config, dtype_of<X>());
    if (std::memcmp(&header, &mine, sizeof header))
        throw Error(format(
            "%s: a %s model with L=%d NH=%d C=%d V=%d, expected this run's %s with L=%d NH=%d C=%d V=%d; remove it "
            "and its state file to resume from the checkpoint before",
            path.c_str(), name_of(header.dtype), header.L, header.NH, header.C, header.V, name_of(mine.dtype), mine.L,
            mine.NH, mine.C, mine.V));
    read_model_parameters(path, header, params.data());
    const uint64_t found = checksum64(params.data(), params.size());
    if (found != counters.model_checksum)
        throw Error(
            format("%s: damaged: its parameters have checksum %016llx, expected %016llx by the state file; remove "
                   "both to resume from the checkpoint before",
                   path.c_str(), static_cast<unsigned long long>(found),
                   static_cast<unsigned long long>(counters.model_checksum)));
}

// Creates the output directory. Refuses one with an earlier run in it unless that is to be resumed.
static void prepare_output_dir(const Options& o) {
    std::error_code error;
    std::filesystem::create_directories(o.output_dir, error);
    if (error)
        throw Error(format("%s: cannot create the directory: %s", o.output_dir.c_str(), error.message().c_str()));
    const int old = newest_checkpoint(o.output_dir);
    const std::string what = old >= 0 ? format("a checkpoint of step %d", old) : "a log of an earlier run";
    struct stat log;
    if (!o.resume && (old >= 0 || (stat((o.output_dir + "/log.jsonl").c_str(), &log) == 0 && log.st_size > 0)))
        throw Error(format("%s has %s: add -y 1 to resume it, or give another -o", o.output_dir.c_str(), what.c_str()));
}

constexpr int kProfileWarmUp = 5;  // steps before --profile's

static Attention attention_of(const Options& o) {
    return o.attention == "naive" ? Attention::naive : Attention::flash;
}

// The defaults that depend on the device, the model and the ranks. resolve_steps has those that need the size of the
// data.
static void resolve_sizes(Options& o, const Config& config, bool on_cpu, int all_ranks) {
    const int context = o.context_parallel, ranks = all_ranks / context;  // groups with sequences of their own
    if (o.B == 0) o.B = on_cpu ? 4 : 8;
    if (o.T == 0) o.T = std::min(config.max_T, on_cpu ? 64 : 1024);
    if (context > 1 && o.T % (2 * context))
        throw UsageError(format("--tokens %d is not a multiple of 2·%d, the chunks of --context-parallel %d: use -t %d",
                                o.T, context, context, std::max(1, o.T / (2 * context)) * 2 * context));
    const long long micro_batch = static_cast<long long>(o.B) * o.T;
    if (micro_batch > INT_MAX / 4)  // the encoder's plan counts in ints
        throw UsageError(
            format("B·T = %d·%d is too many tokens for a micro-batch: use a smaller -b with -d", o.B, o.T));
    const long long least = micro_batch * ranks;
    const char* const name = context > 1 ? "groups of ranks" : "ranks";
    if (least > INT_MAX)
        throw UsageError(
            format("B·T·%s = %d·%d·%d is too many tokens for a step: use a smaller -b", name, o.B, o.T, ranks));
    if (o.tokens_per_step == 0) o.tokens_per_step = static_cast<int>(least);
    if (ranks == 1 && o.tokens_per_step % micro_batch)
        throw UsageError(format("--tokens-per-step %d is not a multiple of B·T = %d·%d = %lld", o.tokens_per_step, o.B,
                                o.T, micro_batch));
    if (o.tokens_per_step % least)
        throw UsageError(format("--tokens-per-step %d is not a multiple of B·T·%s = %d·%d·%d = %lld", o.tokens_per_step,
                                name, o.B, o.T, ranks, least));
    if (o.zero < 0) o.zero = all_ranks > 1 && can_shard(config, all_ranks);
    if (o.lr == 0) o.lr = config.C < 256 ? 2e-3f : 3e-4f;
}
static void resolve_steps(Options& o, bool on_cpu, uint64_t tokens) {
    if (o.max_steps < 0 && o.train_data.empty()) o.max_steps = on_cpu ? 2000 : 6500;
    if (o.max_steps < 0) o.max_steps = static_cast<int>(std::max<uint64_t>(1, tokens / o.tokens_per_step));
    if (o.warmup < 0) o.warmup = std::max(o.max_steps / 20, std::min(50, o.max_steps / 3));
    if (o.val_batches == 0) o.val_batches = 20;
    if (o.val_every < 0) o.val_every = std::max(1, o.max_steps / 10);
    if (o.sample_every < 0) o.sample_every = std::max(1, o.max_steps / 5);
}

template <class Dev, class X>
void start_weights(GPT2<Dev, X>& model, const Options& o, bool from_file) {
    if (from_file)
        model.load(o.init);
    else
        model.init_random(o.seed);
}

// The data of the run. Rank 0 goes first, because it may have to write the data where the others will find it.
static Data find_data_together(const Options& o, Job& job) {
    Data data;
    if (job.rank == 0) data = find_data(o);
    job.barrier();
    if (job.rank > 0) data = find_data(o);
    return data;
}

// Checks what must be the same on all ranks beside the arguments. Only now is this known.
template <class Dev, class X>
void agree_on_start(const GPT2<Dev, X>& model, const Run<Dev, X>& run, Job& job) {
    if (job.size == 1) return;
    std::vector<char> params(model.params.bytes);
    model.dev.download(params.data(), model.params.base, params.size());
    std::vector<std::pair<std::string, std::string>> fields = run.run_identity().fields;
    const auto hex = [](uint64_t x) { return format("%016llx", static_cast<unsigned long long>(x)); };
    fields.push_back({"validation data", hex(run.val_identity())});
    fields.push_back({"parameters", hex(checksum64(params.data(), params.size()))});
    job.agree(fields);
}

template <class Dev, class X>
int run_train(const Dev& dev, Options& o, const Config& config, bool from_file, Job& job, Ranks<Dev> ranks) {
    const bool on_cpu = std::is_same_v<Dev, Cpu>;
    resolve_sizes(o, config, on_cpu, job.size);
    if (o.overlap < 0) o.overlap = job.local_size < job.size;
    ranks.sharded = o.zero > 0 && job.size > 1, ranks.overlap = o.overlap > 0;
    // The model's tables come first, so that an impossible request is refused before data is touched.
    const int micro_steps = o.tokens_per_step / (o.B * o.T * ranks.groups());
    GPT2<Dev, X> model(dev, config, attention_of(o), o.B, o.T / ranks.context, micro_steps, true, o.recompute, ranks);
    if (o.memory) return print_memory_table(model), 0;
    if (!o.output_dir.empty() && job.rank == 0) prepare_output_dir(o);
    const Data data = find_data_together(o, job);
    Run<Dev, X> run(dev, o, model, data, job);
    if (o.profile) o.max_steps = kProfileWarmUp + o.profile;
    if (!can_generate(config)) o.sample_every = 0;
    resolve_steps(o, on_cpu, run.train_tokens());
    run.describe();
    allocate_or_explain(model);
    start_weights(model, o, from_file);
    if (o.resume) {
        const bool found = run.restore();
        std::printf(found ? "resumed at step %d\n" : "nothing to resume: starting at step %d\n", run.step);
        if (run.step >= o.max_steps) std::printf("nothing left to do: raise -x (now %d)\n", o.max_steps);
    }
    agree_on_start(model, run, job);
    run.open_log();
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);

    job.guard([&] {
        if (run.step == 0) run.watch();
        while (run.step < o.max_steps && !run.interrupted()) {
            if (o.profile && run.step == kProfileWarmUp) dev.profile(true);
            run.train_step();
            run.watch();
            if (o.checkpoint_every && run.step % o.checkpoint_every == 0) run.save();
        }
        if (o.profile) dev.profile(false);
        if (run.interrupted())
            std::printf("interrupted at step %d%s\n", run.step,
                        o.output_dir.empty() ? ": no -o, so nothing is saved" : "");
        if (!o.output_dir.empty() && run.step > 0 && !run.saved()) run.save();
        model.leave_ring();
        job.leave();
    });
    return run.interrupted() ? 128 + run.interrupted() : 0;
}

// --eval-only prints the loss over the whole validation data, and the answers to --hellaswag one by one.
template <class Dev, class X>
int run_evaluate(const Dev& dev, Options& o, const Config& config, bool from_file, Job& job, const Ranks<Dev>& ranks) {
    resolve_sizes(o, config, std::is_same_v<Dev, Cpu>, job.size);
    GPT2<Dev, X> model(dev, config, attention_of(o), o.B, o.T / ranks.context, 1, false, 0, ranks);
    std::vector<Choice> choices;
    if (!o.hellaswag.empty()) choices = read_choices(o.hellaswag, config.V, o.T);
    std::unique_ptr<Loader> val;
    double floor = NAN;
    if (choices.empty() || !o.val_data.empty()) {
        const Data data = o.val_data.empty() ? find_data_together(o, job) : Data{"", o.val_data};
        if (data.val.empty()) throw UsageError("--eval-only with -i needs validation data: give it with -j");
        val = std::make_unique<Loader>(data.val, o.B, o.T, config.V, false, 0);
        floor = data.floor;
    }
    allocate_or_explain(model);
    start_weights(model, o, from_file);
    if (val) {
        const auto [loss, batches] = validate(model, *val, o.val_batches, job);
        std::printf("val loss %.6f over %llu batches of %d x %d tokens%s\n", loss,
                    static_cast<unsigned long long>(batches), o.B, o.T,
                    std::isnan(floor) ? "" : format(" | floor %.6f", floor).c_str());
    }
    const std::vector<std::vector<double>> losses = ending_losses(model, choices, job);
    for (size_t i = 0; i < choices.size(); i++) {
        std::printf("question %d | answer %d | label %d | losses", choices[i].index, answer(losses[i]),
                    choices[i].label);
        for (double loss : losses[i]) std::printf(" %.6f", loss);
        std::printf("\n");
    }
    const int correct = count_correct(losses, choices);
    if (!choices.empty())
        std::printf("hellaswag %d of %zu, %.2f%%\n", correct, choices.size(), 100.0 * correct / choices.size());
    model.leave_ring();
    job.leave();
    return 0;
}

template <class Dev, class X>
int run_generate(const Dev& dev, const Options& o, const Config& config) {
    const int T = std::min(config.max_T, o.T ? o.T : 1024);
    GPT2<Dev, X> model(dev, config, attention_of(o), 1, T, 1, false);
    allocate_or_explain(model);
    model.load(o.init);
    const Tokenizer tokenizer = o.tokenizer.empty() ? Tokenizer() : Tokenizer(o.tokenizer);
    const std::string text = generate(model, tokenizer, o.prompt, o.generate, {o.temperature, o.top_k}, o.seed);
    std::printf("%s\n", for_terminal(text).c_str());
    return 0;
}

template <class Dev, class X>
int run_with(const Dev& dev, Options& o, Job& job) {
    Config config;
    const bool preset = find_config(o.init, &config);
    if (!preset) {
        struct stat file;
        if (stat(o.init.c_str(), &file))
            throw UsageError(format("--init %s: neither d12, d24, d36, d48, tiny nor a file", o.init.c_str()));
        config = config_of(read_model_header(o.init));
    }
    if (preset) config.max_T = std::max(config.max_T, o.T);  // a new model has at least -t positions
    if (o.generate > 0) {
        if (preset) throw UsageError("--generate needs a trained model: give its checkpoint with -e");
        return run_generate<Dev, X>(dev, o, config);
    }
    using Comm = typename Dev::Comm;
    std::unique_ptr<Comm> comm, ring;
    Ranks<Dev> ranks;
    ranks.rank = job.rank, ranks.size = job.size, ranks.context = o.context_parallel;
    job.expect_progress(kStallSeconds);
    if (job.size > 1 && !o.memory && (!o.eval_only || ranks.context > 1)) {
        comm = std::make_unique<Comm>(dev, job);
        if (ranks.context > 1) ring = std::make_unique<Comm>(*comm, ranks.group() * ranks.context, ranks.context);
    }
    ranks.comm = comm.get(), ranks.ring = ring.get();
    job.expect_progress(0);
    if (o.eval_only) return run_evaluate<Dev, X>(dev, o, config, !preset, job, ranks);
    return run_train<Dev, X>(dev, o, config, !preset, job, ranks);
}

#ifndef TRAIN_GPT2_NO_MAIN
// Threads that spin while they wait for each other are fast on an idle machine. If another program has one of the cores
// they are four times slower than sleeping ones. OpenMP reads the choice before main, so the program starts once more
// with it made.
static void wait_passively(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);  // returns only if it failed, and then we go on as we are
}

// Meets the other ranks, which must be the same program with the same arguments. Rank 0 alone prints.
static void meet(Job& job, Options& o) {
    const InputFile program("/proc/self/exe");
    std::vector<char> bytes(program.size);
    program.read(0, bytes.data(), bytes.size());
    std::vector<std::pair<std::string, std::string>> fields = {
        {"program", format("%016llx", static_cast<unsigned long long>(checksum64(bytes.data(), bytes.size())))}};
    std::istringstream settings(options_settings(o.table()));
    for (std::string line; std::getline(settings, line);) {
        const size_t end = line.find(' ');
        fields.push_back({line.substr(0, end), line.substr(std::min(line.find_first_not_of(' ', end), line.size()))});
    }
    job.agree(fields);
    if (job.rank > 0 && !std::freopen("/dev/null", "w", stdout)) throw Error("cannot open /dev/null");
}

// The run, on this rank's device. gpus is the number on this machine.
static int run_on_device(Options& o, Job& job, int gpus) {
    if (gpus == 0) {
        if (o.precision == "bf16") throw UsageError("--precision bf16 needs a GPU; the CPU runs fp32");
        if (o.init == "auto") o.init = "tiny";
        const int cores = static_cast<int>(std::thread::hardware_concurrency());
        return run_with<Cpu, float>(Cpu(std::max(1, cores / job.local_size)), o, job);
    }
    // A launcher may show each rank only its own GPU.
    const int device = gpus == 1 && job.local_size > 1 && std::getenv("CUDA_VISIBLE_DEVICES") ? 0 : job.local_rank;
    if (device >= gpus)
        throw Error(format("rank %d is number %d on this machine, which has %d %s: start fewer ranks", job.rank,
                           job.local_rank, gpus, gpus == 1 ? "GPU" : "GPUs"));
    Cuda dev(device);
    dev.tf32 = !o.no_tf32 && dev.sm >= 80;
    dev.graphs = !o.no_graph && !o.profile;
    if (o.init == "auto") o.init = "d12";
    if (o.precision == "bf16" && dev.sm < 80)
        throw Error(format("--precision bf16 needs compute capability 8.0 or later, %s has %d.%d: use --precision fp32",
                           dev.name.c_str(), dev.sm / 10, dev.sm % 10));
    if (o.precision == "auto") o.precision = dev.sm >= 80 ? "bf16" : "fp32";
    return o.precision == "bf16" ? run_with<Cuda, bf16>(dev, o, job) : run_with<Cuda, float>(dev, o, job);
}

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line at a time, into files and pipes too
    return run_program("train_gpt2cu", [&] {
        Options o;
        std::vector<Option> table = o.table();
        const bool help = parse_options(argc, argv, table);
        if (help) {
            const char* about = "Trains GPT-2. Without options: 124M parameters on the built-in corpus.";
            std::printf("%s", options_help("train_gpt2cu", about, table).c_str());
            return 0;
        }
        if (o.output_dir.empty() && (o.resume || o.checkpoint_every || o.keep))
            throw UsageError("--resume, --checkpoint-every and --keep need a directory: give it with -o");
        if (o.profile && !o.output_dir.empty()) throw UsageError("--profile writes nothing: leave out -o");
        if (o.eval_only && o.init == "auto") throw UsageError("--eval-only needs a model: give its checkpoint with -e");
        const Place place = place_from_environment();
        const int ranks = std::max(o.gpus, place.size);
        if (ranks % o.context_parallel)
            throw UsageError(format("--context-parallel %d does not divide the %d %s that train: use --gpus %d",
                                    o.context_parallel, ranks, ranks == 1 ? "GPU" : "GPUs",
                                    (ranks / o.context_parallel + 1) * o.context_parallel));
        if (o.context_parallel > 1 && !o.hellaswag.empty())
            throw UsageError("--hellaswag needs whole sequences: leave out --context-parallel");
        if (o.gpus > 1 && place.size == 1) return launch_ranks(o.gpus, argv);
        if (o.gpus > 0 && o.gpus != place.size)
            throw UsageError(
                format("--gpus %d, but the launcher started %d ranks: leave out --gpus", o.gpus, place.size));
        if (o.generate > 0 && place.size > 1) throw UsageError("--generate runs on one GPU: leave out --gpus");
        std::string why;
        const int gpus = o.device == "cpu" ? 0 : Cuda::count(&why);
        if (o.device == "cuda" && gpus == 0) throw Error("--device cuda: " + why + "; use --device cpu");
        if (gpus == 0) wait_passively(argv);
        if (gpus == 0 && o.device == "auto" && place.rank == 0)
            std::fprintf(stderr, "no usable GPU (%s): using the CPU\n", why.c_str());
        Job job(place);
        return job.guard([&] {
            if (job.size > 1) meet(job, o);
            return run_on_device(o, job, gpus);
        });
    });
}
#endif
