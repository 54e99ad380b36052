// GPT-2 training, top to bottom: config → tensors → forward → backward → update → main.
//
//   make train_gpt2cu && ./train_gpt2cu          trains a 124M model on the built-in corpus
//   ./train_gpt2cu --help                        every option
//
// The model is written once over two backends: `Dev` is Cuda (layers/, attention/) or Cpu (dev/reference), and the same
// layer calls mean the same things on both. `X` is the storage type of weights and activations: bf16 or float on CUDA,
// float (or double, in tests) on the CPU. Sums, statistics, gradients of weights and optimizer state are A = Acc<X>.
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
#include <exception>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "data/checkpoint.h"
#include "data/choices.h"
#include "data/corpus.h"
#include "data/error.h"
#include "data/loader.h"
#include "data/log.h"
#include "data/options.h"
#include "data/random.h"
#include "data/tokenizer.h"
#include "dev/reference.h"
#include "layers/layers.h"
#include "layers/peak.h"

// A named stretch of the timeline, for Nsight Systems (make profile).
struct Range {
    explicit Range(const char* name) { nvtxRangePushA(name); }
    Range(const char* name, int i) { nvtxRangePushA(format("%s %d", name, i).c_str()); }
    ~Range() { nvtxRangePop(); }
};

// =====================================================================================================================
// Config

struct Config {
    int max_T, V, Vp, L, NH, C;  // positions, vocabulary, padded vocabulary, layers, heads, channels

    int HS() const { return C / NH; }
    size_t flops_per_token(int T) const;  // forward and backward
};

// "d12", "d24", "d36", "d48": GPT-2 with that many layers; "tiny": what a CPU trains in a minute, on single bytes.
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
// One table per arena says what there is; it drives allocation, the pointers below, the memory report, checkpoints and
// the search for the first tensor that is not finite.

struct TensorSpec {
    const char* name;
    DType dtype;
    size_t size;     // elements, of one layer if there are several
    int layers = 0;  // 0: not a per-layer tensor; kShared: every layer overwrites what the one before it left
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
    // align: 1 packs the tensors as they lie in a checkpoint.
    Arena(const char* name, std::vector<TensorSpec> specs, size_t align = 256) : name(name), tensors(std::move(specs)) {
        for (const TensorSpec& t : tensors) {
            offsets.push_back(bytes);
            bytes += (t.elements() * size_of(t.dtype) + align - 1) / align * align;
        }
    }
    // Tensor i, or layer l's part of it.
    void* at(size_t i, int l = 0) const {
        if (i >= tensors.size() || tensors[i].elements() == 0) return nullptr;  // as all of a model that only generates
        const TensorSpec& t = tensors[i];
        return base + offsets[i] + (t.layers > 0 ? static_cast<size_t>(l) * t.size * size_of(t.dtype) : 0);
    }
};

// The sixteen parameter tensors in llm.c's file order; for a per-layer one the pointer is that layer's part.
// P is X for the parameters themselves and A for their gradients.
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

// 2 FLOPs forward and 4 backward for each parameter, and causal attention's 6·L·C·T.
size_t Config::flops_per_token(int T) const {
    return 6 * count_parameters(*this) + 6 * static_cast<size_t>(L) * C * T;
}

// What forward keeps for backward. Per-layer tensors point at one layer's part. N = B·T rows.
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
    X* logits;       // (chunk, Vp): the classifier works through the rows a chunk at a time
    Acc<X>* losses;  // (N)
    Acc<X>* stats;   // (accumulation steps + 1): mean loss of each micro-batch, then the gradient's norm
    X* dresidual;    // (N, C) gradient of the residual stream
    X* wide;         // (N, 4C) gradient of fch, then of qkv; where GELU's outputs are kept, theirs is the memory for it
    void* scratch;   // for whoever runs: D, partial sums, pointers
    int* batch;      // tokens, targets and encoder plans of a whole step
};

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
    const int B, T, micro_steps;
    const bool training;
    const int recompute;
    const size_t num_parameters;
    Arena params, grads, adam, acts, buffers;

    // Only the tables; allocate() makes them memory. training: with gradients, optimizer state and what backward needs.
    // recompute: what forward does not keep and backward computes again: 1 the outputs of GELU, 2 of layer norms too.
    GPT2(const Dev& dev, const Config& config, Attention attention, int B, int T, int micro_steps, bool training,
         int recompute = 0);
    ~GPT2() {
        for (Arena* a : arenas()) dev.free(a->base);
    }
    GPT2(const GPT2&) = delete;
    GPT2& operator=(const GPT2&) = delete;

    std::array<Arena*, 5> arenas() { return {&params, &grads, &adam, &acts, &buffers}; }
    size_t total_bytes() {
        size_t bytes = 0;
        for (Arena* a : arenas()) bytes += a->bytes;
        return bytes;
    }
    void allocate();

    void init_random(uint64_t seed);
    void load(const std::string& path);

    // The step: upload all its micro-batches, then for each forward, loss (which starts backward) and backward.
    size_t batch_ints() const { return 2 * rows_ + encoder_plan_ints(dev, rows_); }  // of one micro-batch
    void fill_batch(int* host, Loader& loader) const;  // tokens, targets, plan of one micro-batch
    void upload(const int* host, int micro_batches);
    void forward(const int* tokens, int b, int t);  // device tokens (b, t) → acts.lnf
    // accumulate: weight gradients are added to what is there; else they are written.
    void loss(const int* targets, int b, int t, A* mean_loss, bool with_gradient, bool accumulate = true);
    void backward(const int* plan, bool accumulate);
    void clear_gradients();
    void train_micro_batch(int i);
    void train_micro_batches();  // all of a step
    void update(const AdamW& hyper);
    void evaluate_micro_batch(int i);

    const int* tokens(int i) const { return buffers_.batch + i * batch_ints(); }
    const int* targets(int i) const { return tokens(i) + rows_; }
    const int* plan(int i) const { return tokens(i) + 2 * rows_; }
    A* stats() const { return buffers_.stats; }
    A* losses() const { return buffers_.losses; }  // (N) of the last micro-batch

    std::vector<float> logits_of_last(const std::vector<int>& context);
    std::string first_nonfinite();

    Parameters<X> weights(int l = 0) const { return view<X>(params, l); }
    Parameters<A> gradients(int l = 0) const { return view<A>(grads, l); }
    Activations<X> activations(int l = 0) const;
    A* adam_m() const { return static_cast<A*>(adam.at(0)); }
    A* adam_v() const { return static_cast<A*>(adam.at(1)); }
    A* master() const { return static_cast<A*>(has_master ? adam.at(2) : nullptr); }
    std::vector<ParamRange> ranges() const;

  private:
    const size_t rows_, chunk_;  // N = B·T, rows of logits that exist at once
    Buffers<X> buffers_{};
    typename Dev::Graph graph_;  // of train_micro_batches

    template <class P>
    static Parameters<P> view(const Arena& arena, int l) {
        size_t i = 0;
        auto next = [&] { return static_cast<P*>(arena.at(i++, l)); };
        return {next(), next(), next(), next(), next(), next(), next(), next(),
                next(), next(), next(), next(), next(), next(), next(), next()};
    }
    std::string count_in(const Arena& arena, size_t i, int l);
    void set_parameters(std::vector<A>& values);
};

// Rows of logits that exist at once: enough to fill the GPU, little enough that (B·T, Vp) never exists whole.
static size_t classifier_chunk(size_t rows, int Vp, DType t) {
    size_t chunk = 512;
    while (chunk < rows && 2 * chunk * Vp * size_of(t) <= (size_t(512) << 20)) chunk *= 2;
    return std::min(chunk, rows);
}

// Behind the gradients stands a gate of a few elements, 0 or NaN: update() writes 0·loss there and lets the norm run
// over it, so that one number stops the update both for a gradient and for a loss that is not finite. (Four elements,
// so that the norm's 16-byte loads stay possible.)
constexpr size_t kGate = 4;

template <class Dev, class X>
GPT2<Dev, X>::GPT2(const Dev& dev, const Config& config, Attention attention, int B, int T, int micro_steps,
                   bool training, int recompute)
    : dev(dev),
      config(config),
      attention(attention),
      B(B),
      T(T),
      micro_steps(micro_steps),
      training(training),
      recompute(recompute),
      num_parameters(count_parameters(config)),
      rows_(size_t(B) * T),
      chunk_(classifier_chunk(rows_, config.Vp, dtype_of<X>())) {
    if (T > config.max_T)
        throw Error(
            format("T = %d is beyond the model's %d positions: use -t %d or less", T, config.max_T, config.max_T));
    const size_t N = rows_, C = config.C, NH = config.NH, n = num_parameters;
    const DType x = dtype_of<X>(), a = dtype_of<A>();
    const int L = config.L, HS = config.HS();

    params = Arena("parameters", parameter_specs(config, x), 1);
    if (training) {
        std::vector<TensorSpec> specs = parameter_specs(config, a);
        specs.push_back({"loss", a, kGate});
        grads = Arena("gradients", specs, 1);
        adam = Arena("optimizer", {{"m", a, n}, {"v", a, n}, {"master", a, has_master ? n : 0}});
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
    const size_t scratch =
        std::max({attention_scratch_bytes<X>(dev, attention, B, T, NH, HS), encoder_scratch_bytes(dev, B, T, C),
                  layernorm_scratch_bytes(dev, C), matmul_scratch_bytes(dev, 4 * C),
                  matmul_gelu_scratch_bytes(dev, N, 4 * C, C), reduce_scratch_bytes(dev), size_t(256)});
    buffers = Arena("buffers", {{"logits", x, chunk_ * config.Vp},
                                {"losses", a, N},
                                {"stats", a, size_t(micro_steps) + 1},
                                {"dresidual", x, training ? N * C : 0},
                                {"wide", x, training && recompute >= 1 ? N * 4 * C : 0},
                                {"scratch", DType::i32, (scratch + 3) / 4},
                                {"batch", DType::i32, size_t(micro_steps) * batch_ints()}});
}

template <class Dev, class X>
void GPT2<Dev, X>::allocate() {
    for (Arena* a : arenas())
        if (a->bytes) a->base = static_cast<char*>(dev.alloc(a->bytes));
    const Arena& b = buffers;
    buffers_ = {static_cast<X*>(b.at(0)),  static_cast<A*>(b.at(1)), static_cast<A*>(b.at(2)),
                static_cast<X*>(b.at(3)),  static_cast<X*>(b.at(4)), b.at(5),
                static_cast<int*>(b.at(6))};
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
void GPT2<Dev, X>::forward(const int* tokens, int b, int t) {
    Range range("forward");
    const size_t N = size_t(b) * t;
    const int C = config.C, L = config.L, NH = config.NH, HS = config.HS();
    Activations<X> a = activations(0);
    Parameters<X> w = weights(0);

    encoder_forward(dev, a.encoded, tokens, w.wte, w.wpe, b, t, C);
    layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, a.encoded, w.ln1w, w.ln1b, N, C);
    X* residual = a.encoded;
    for (int l = 0; l < L; l++) {
        Range range("layer", l);
        a = activations(l), w = weights(l);
        matmul_forward(dev, a.qkv, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C);
        attention_forward(dev, attention, a.atty, a.lse, a.att, buffers_.scratch, a.qkv, b, t, NH, HS);
        matmul_forward(dev, a.residual2, a.atty, w.attprojw, w.attprojb, N, C, C);
        residual_layernorm_forward(dev, a.residual2, a.ln2, a.ln2_mean, a.ln2_rstd, residual, a.residual2, w.ln2w,
                                   w.ln2b, N, C);
        matmul_gelu_forward(dev, a.gelu, a.fch, a.ln2, w.fcw, w.fcb, N, C, 4 * C);
        matmul_forward(dev, a.residual3, a.gelu, w.fcprojw, w.fcprojb, N, 4 * C, C);
        // The residual's sum belongs to the layer norm that reads it: the next layer's first, or the final one.
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

// Cross-entropy over the rows of lnf, in chunks of rows. Writes the mean to mean_loss. With gradient, also what must
// happen while a chunk's logits exist: adds into dwte and overwrites lnf with d(mean loss of the step)/d lnf.
template <class Dev, class X>
void GPT2<Dev, X>::loss(const int* targets, int b, int t, A* mean_loss, bool with_gradient, bool accumulate) {
    Range range("loss");
    const size_t N = size_t(b) * t;
    const int C = config.C, V = config.V, Vp = config.Vp;
    X* lnf = activations().lnf;
    const X* wte = weights().wte;
    const A dloss = with_gradient ? A(1) / (A(N) * micro_steps) : A(0);
    for (size_t row = 0; row < N; row += chunk_) {
        const size_t n = std::min(chunk_, N - row);
        matmul_forward<X>(dev, buffers_.logits, lnf + row * C, wte, nullptr, n, C, Vp);
        classifier(dev, buffers_.logits, buffers_.losses + row, targets + row, dloss, n, V, Vp);
        if (with_gradient)
            matmul_backward<X>(dev, lnf + row * C, gradients().wte, nullptr, buffers_.scratch, buffers_.logits,
                               lnf + row * C, wte, n, C, Vp, accumulate || row > 0);
    }
    reduce_sum(dev, mean_loss, buffers_.scratch, buffers_.losses, A(1) / A(N), N);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: adds into the gradients of all parameters, or writes those of the weights. Starts from lnf, where loss()
// left its gradient, and keeps using its memory for the gradient of a layer norm's output.

template <class Dev, class X>
void GPT2<Dev, X>::backward(const int* plan, bool accumulate) {
    Range range("backward");
    const size_t N = rows_;
    const int C = config.C, NH = config.NH, HS = config.HS();
    X* dresidual = buffers_.dresidual;
    void* scratch = buffers_.scratch;
    Activations<X> a = activations(config.L - 1);
    X* dln = a.lnf;
    Parameters<X> w = weights();
    Parameters<A> g = gradients();

    // A layer norm's backward also sums the rows of the residual stream's gradient: the bias gradient of the projection
    // that was added there last.
    dev.zero(dresidual, N * C * sizeof(X));
    layernorm_backward(dev, dresidual, g.lnfw, g.lnfb, gradients(config.L - 1).fcprojb, scratch, dln, a.residual3,
                       w.lnfw, a.lnf_mean, a.lnf_rstd, N, C);
    for (int l = config.L - 1; l >= 0; l--) {
        Range range("layer", l);
        a = activations(l), w = weights(l), g = gradients(l);
        const X* residual = l ? activations(l - 1).residual3 : a.encoded;
        A* bias_below = l ? gradients(l - 1).fcprojb : nullptr;
        A* const none = nullptr;
        X* wide = recompute >= 1 ? buffers_.wide : a.gelu;
        auto fcproj_weight_gradient = [&] {
            matmul_backward<X>(dev, nullptr, g.fcprojw, none, scratch, dresidual, a.gelu, nullptr, N, 4 * C, C,
                               accumulate);
        };
        if (recompute == 0) fcproj_weight_gradient();  // before fch's gradient takes the place of GELU's output
        matmul_gelu_backward(dev, wide, g.fcb, recompute >= 1 ? a.gelu : nullptr, scratch, dresidual, w.fcprojw, a.fch,
                             N, 4 * C, C);
        if (recompute >= 1) fcproj_weight_gradient();  // of the output that the pass over fch made again
        if (recompute >= 2) layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N, C);
        matmul_backward(dev, dln, g.fcw, none, scratch, wide, a.ln2, w.fcw, N, C, 4 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln2w, g.ln2b, g.attprojb, scratch, dln, a.residual2, w.ln2w, a.ln2_mean,
                           a.ln2_rstd, N, C);
        matmul_backward(dev, dln, g.attprojw, none, scratch, dresidual, a.atty, w.attprojw, N, C, C, accumulate);
        attention_backward(dev, attention, wide, scratch, dln, a.atty, a.lse, a.att, a.qkv, B, T, NH, HS);
        if (recompute >= 2) layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N, C);
        matmul_backward(dev, dln, g.qkvw, g.qkvb, scratch, wide, a.ln1, w.qkvw, N, C, 3 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln1w, g.ln1b, bias_below, scratch, dln, residual, w.ln1w, a.ln1_mean,
                           a.ln1_rstd, N, C);
    }
    encoder_backward(dev, g.wte, g.wpe, scratch, dresidual, plan, B, T, C);
}

// ---------------------------------------------------------------------------------------------------------------------
// The step's pieces

template <class Dev, class X>
void GPT2<Dev, X>::fill_batch(int* host, Loader& loader) const {
    loader.next(host, host + rows_);
    if (training) encoder_plan(dev, host + 2 * rows_, host, rows_);
}

template <class Dev, class X>
void GPT2<Dev, X>::upload(const int* host, int micro_batches) {
    dev.upload(buffers_.batch, host, size_t(micro_batches) * batch_ints() * sizeof(int));
}

// The weights of the matmuls need no zeros: the first micro-batch writes their gradients.
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
void GPT2<Dev, X>::train_micro_batch(int i) {
    const bool accumulate = i > 0;
    if (!accumulate) clear_gradients();
    forward(tokens(i), B, T);
    loss(targets(i), B, T, stats() + i, true, accumulate);
    backward(plan(i), accumulate);
}

template <class Dev, class X>
void GPT2<Dev, X>::train_micro_batches() {
    Range range("forward and backward");
    graph_.run(dev, [&] {
        for (int i = 0; i < micro_steps; i++) train_micro_batch(i);
    });
}

template <class Dev, class X>
void GPT2<Dev, X>::evaluate_micro_batch(int i) {
    forward(tokens(i), B, T);
    loss(targets(i), B, T, stats() + i, false);
}

// Nothing is updated where a loss or the gradient's norm is not finite; the caller sees that in stats[micro_steps].
template <class Dev, class X>
void GPT2<Dev, X>::update(const AdamW& hyper) {
    Range range("update");
    A* norm = stats() + micro_steps;
    A* gate = static_cast<A*>(grads.at(grads.tensors.size() - 1));
    reduce_sum(dev, gate, buffers_.scratch, stats(), A(0), micro_steps);
    global_norm(dev, norm, buffers_.scratch, static_cast<const A*>(grads.at(0)), num_parameters + kGate);
    const std::vector<ParamRange> r = ranges();
    adamw_update(dev, static_cast<X*>(params.at(0)), master(), adam_m(), adam_v(), static_cast<const A*>(grads.at(0)),
                 norm, r.data(), static_cast<int>(r.size()), hyper);
}

template <class Dev, class X>
std::vector<ParamRange> GPT2<Dev, X>::ranges() const {
    std::vector<ParamRange> ranges;
    for (size_t i = 0; i < params.tensors.size(); i++)
        ranges.push_back({params.offsets[i] / sizeof(X), params.tensors[i].elements(), params.tensors[i].decay});
    return ranges;
}

// ---------------------------------------------------------------------------------------------------------------------
// Parameters: random, or from a file

// A stateless generator: the same (seed, index) gives the same number on every machine and thread.
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

// From the master's precision to X, on the device.
template <class Dev, class X>
void GPT2<Dev, X>::set_parameters(std::vector<A>& values) {
    if (master()) dev.upload(master(), values.data(), num_parameters * sizeof(A));
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

// GPT-2's initialisation: normal with σ = 0.02, the two projections into the residual stream scaled by 1/√(2L) (Radford
// et al. 2019, §2.3), biases 0, layer norm weights 1. Padding rows of wte are 0.
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
// When a loss is not finite: run again, micro-batch by micro-batch, and name the first tensor in the order of
// computation.

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

// An arena's tensors in the order of computation: what comes before the layers, layer by layer, what comes after them.
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
    for (int i = 0; i < micro_steps && found.empty(); i++) {
        evaluate_micro_batch(i);
        found = search(acts, false);
        if (!found.empty()) break;
        train_micro_batch(i);
        found = search(grads, true);
    }
    return found.empty() ? "none on a second run" : found;
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
    // Round t up so that matmul plans are reused from token to token; what follows the last token cannot be seen by it.
    const int t = std::min((used + 63) / 64 * 64, T);
    std::vector<int> padded(t, 0);
    std::copy(context.end() - used, context.end(), padded.begin());
    dev.upload(buffers_.batch, padded.data(), padded.size() * sizeof(int));
    forward(buffers_.batch, 1, t);
    matmul_forward<X>(dev, buffers_.logits, activations().lnf + size_t(used - 1) * config.C, weights().wte, nullptr, 1,
                      config.C, config.Vp);
    std::vector<X> row(config.Vp);
    dev.download(row.data(), buffers_.logits, row.size() * sizeof(X));
    std::vector<float> logits(config.V);
    for (int v = 0; v < config.V; v++) logits[v] = static_cast<float>(row[v]);
    return logits;
}

// A token from softmax(logits / temperature) over the top_k largest, by one uniform number; temperature 0 takes the
// largest.
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

// Mean loss over the loader's first batches; 0, or more than there are: all whole ones.
template <class Dev, class X>
Validation validate(GPT2<Dev, X>& model, Loader& loader, uint64_t batches) {
    Range range("validate");
    loader.reset();
    double sum = 0;
    std::vector<int> host(model.batch_ints());
    const uint64_t all = loader.batches_per_epoch();
    if (batches == 0 || batches > all) batches = all;
    for (uint64_t i = 0; i < batches; i++) {
        Acc<X> loss;
        model.fill_batch(host.data(), loader);
        model.upload(host.data(), 1);
        model.evaluate_micro_batch(0);
        model.dev.download(&loss, model.stats(), sizeof loss);
        sum += loss;
    }
    return {sum / batches, batches};
}

// The model's answer to each question: the ending whose tokens have the lowest mean loss after the context.
// losses[i][e] is that mean for ending e of choice i.
template <class Dev, class X>
std::vector<std::vector<double>> ending_losses(GPT2<Dev, X>& model, const std::vector<Choice>& choices) {
    Range range("multiple choice");
    const size_t B = model.B, T = model.T, N = B * T;
    std::vector<std::pair<size_t, size_t>> rows;  // choice, ending: a row of a batch each
    std::vector<std::vector<double>> losses(choices.size());
    for (size_t i = 0; i < choices.size(); i++) {
        losses[i].resize(choices[i].endings.size());
        for (size_t e = 0; e < losses[i].size(); e++) rows.push_back({i, e});
    }
    std::vector<int> host(model.batch_ints());
    std::vector<Acc<X>> position(N);
    for (size_t first = 0; first < rows.size(); first += B) {
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
    int generate = 0, top_k = 0;
    std::string prompt;
    float temperature = 1.f;

    std::vector<Option> table();
    double learning_rate(int step) const;  // of the step that makes this one, from 0
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
        {"--batch", "-b", O::Int, &B, "sequences per micro-batch; 0: 8 (CPU: 4)", "0..65536", "batch"},
        {"--tokens", "-t", O::Int, &T, "tokens per sequence; 0: at most 1024 (CPU: 64) of the model's positions",
         "0..4194304", "batch"},
        {"--tokens-per-step", "-d", O::Int, &tokens_per_step, "tokens per update, a multiple of B·T; 0: B·T", "0..",
         "batch"},
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

// Warm-up is linear to the full rate at step `warmup`; then by --schedule down to final_lr·lr at the last step.
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

// SIGINT and SIGTERM: finish the step, write a checkpoint, leave. A second one ends the program at once.
static volatile std::sig_atomic_t g_signal = 0;
static void on_signal(int signal) {
    g_signal = signal;
    std::signal(signal, SIG_DFL);
}

// Where the data comes from, and the loss that no model can beat if that is known.
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

// Every tensor with its size; for what grows with the batch also the bytes that one token adds.
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
        return GPT2<Dev, X>(model.dev, model.config, model.attention, b, model.T, 1, model.training, model.recompute)
            .total_bytes();
    };
    int b = model.B - 1;
    while (b > 0 && bytes_with(b) > free_bytes) b--;
    std::string way_out =
        b > 0 ? format("-b %d would fit", b) : "not even -b 1 fits: use a smaller -t or a smaller model";
    if (model.training && model.recompute < 2) way_out += "; --recompute 2 needs less";
    throw OutOfMemory(format("%s has %.2f GiB free, the model needs %.2f GiB at B=%d T=%d (%s): %s",
                             model.dev.name.c_str(), free_bytes / kGiB, model.total_bytes() / kGiB, model.B, model.T,
                             asked.c_str(), way_out.c_str()));
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

// A training run: the model and all that goes with it from step to step.
template <class Dev, class X>
class Run {
  public:
    Run(const Dev& dev, const Options& o, GPT2<Dev, X>& model, const Data& data);
    ~Run() { dev.free_host(host); }

    void describe() const;
    void open_log();
    void train_step();
    void watch();    // validation and samples, where this step has them
    void save();     // a checkpoint of this step
    bool restore();  // the newest checkpoint; false if there is none
    bool saved() const { return last_checkpoint == step; }
    uint64_t train_tokens() const { return train.num_tokens(); }
    int step = 0;  // steps done

  private:
    using A = Acc<X>;
    const Dev& dev;
    const Options& o;
    GPT2<Dev, X>& model;
    const Data data;
    Loader train;
    std::unique_ptr<Loader> val;
    const Tokenizer tokenizer;
    std::vector<Choice> choices;
    Identity identity;
    std::unique_ptr<Log> log = std::make_unique<Log>();
    int last_checkpoint = -1;
    double mean_ms = 0;

    // Batches of two steps, pinned: one that the GPU works on, one that is prepared meanwhile. `position` is where the
    // training data goes on after the first of them.
    int *host = nullptr, *batch = nullptr, *next = nullptr;
    bool prepared = false;
    std::exception_ptr late_error;  // of preparing `next`
    LoaderState position{};
    void prepare(int* to) {
        for (int i = 0; i < model.micro_steps; i++) model.fill_batch(to + i * model.batch_ints(), train);
    }

    // The parts of a checkpoint beside the model: for reading and for writing.
    struct Counters {
        uint64_t step, model_checksum;
        LoaderState train;
    };
    static std::vector<Section> sections(Counters& counters, std::vector<char>& adam) {
        return {{"counters", &counters, sizeof counters}, {"optimizer", adam.data(), adam.size()}};
    }
};

template <class Dev, class X>
Run<Dev, X>::Run(const Dev& dev, const Options& o, GPT2<Dev, X>& model, const Data& data)
    : dev(dev),
      o(o),
      model(model),
      data(data),
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

// A fresh run's log begins anew, a resumed one's loses the rows that it will write again.
template <class Dev, class X>
void Run<Dev, X>::open_log() {
    if (o.output_dir.empty()) return;
    const std::string path = o.output_dir + "/log.jsonl";
    if (o.resume) Log::truncate_after(path, step);
    log = std::make_unique<Log>(path, o.resume);
    Row row("run");
    row.add("device", dev.name).add("precision", name_of(dtype_of<X>())).add("attention", o.attention);
    row.add("parameters", static_cast<long long>(model.num_parameters)).add("B", o.B).add("T", o.T);
    row.add("tokens_per_step", o.tokens_per_step).add("steps", o.max_steps).add("seed", o.seed);
    log->write(row.add("floor_nats", data.floor));
}

template <class Dev, class X>
void Run<Dev, X>::train_step() {
    Range range("step", step);
    const auto start = std::chrono::steady_clock::now();
    if (late_error) std::rethrow_exception(late_error);
    if (!prepared) prepare(batch);
    prepared = true;
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

    std::vector<A> stats(model.micro_steps + 1);
    dev.download(stats.data(), model.stats(), stats.size() * sizeof(A));
    const double loss = std::accumulate(stats.begin(), stats.end() - 1, 0.0) / model.micro_steps, norm = stats.back();
    if (!std::isfinite(loss) || !std::isfinite(norm)) {
        const std::string last_good = last_checkpoint < 0 ? "none" : state_path(o.output_dir, last_checkpoint);
        throw Error(
            format("step %d: loss %g, gradient norm %g; first tensor that is not finite: %s; nothing was updated; last "
                   "good checkpoint: %s; a lower -l or a longer -u may help",
                   step + 1, loss, norm, model.first_nonfinite().c_str(), last_good.c_str()));
    }
    if (another) std::swap(batch, next);
    step++;

    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    mean_ms = mean_ms == 0 ? ms : 0.95 * mean_ms + 0.05 * ms;
    const double tok_s = o.tokens_per_step / ms * 1e3, peak = peak_tflops(dev.name, std::is_same_v<X, bf16>, dev.tf32);
    const double mfu = peak > 0 ? 100 * tok_s * model.config.flops_per_token(o.T) / (peak * 1e12) : NAN;
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
        const double loss = validate(model, *val, o.val_batches).loss;
        const std::string floor = std::isnan(data.floor) ? "" : format(" | floor %.4f", data.floor);
        std::printf("step %d/%d | val loss %.4f%s\n", step, o.max_steps, loss, floor.c_str());
        log->write(Row("val").add("step", step).add("loss_nats", loss).add("floor_nats", data.floor));
    }
    if (!choices.empty() && due(o.val_every)) {
        const int correct = count_correct(ending_losses(model, choices), choices);
        std::printf("step %d/%d | hellaswag %d of %zu, %.2f%%\n", step, o.max_steps, correct, choices.size(),
                    100.0 * correct / choices.size());
        Row row("hellaswag");
        log->write(row.add("step", step).add("correct", correct).add("examples", static_cast<int>(choices.size())));
    }
    if (step > 0 && due(o.sample_every)) {
        const Sampling sampling = {o.temperature, o.top_k};
        const std::string text = generate(model, tokenizer, o.prompt, o.sample_length, sampling, mix(o.seed, step));
        std::printf("step %d/%d | sample\n---\n%s\n---\n", step, o.max_steps, text.c_str());
        log->write(Row("sample").add("step", step).add("text", text));
    }
}

template <class Dev, class X>
void Run<Dev, X>::save() {
    Range range("checkpoint");
    std::vector<char> adam(model.adam.bytes), params(model.params.bytes);
    dev.download(adam.data(), model.adam.base, adam.size());
    dev.download(params.data(), model.params.base, params.size());
    Counters counters = {uint64_t(step), checksum64(params.data(), params.size()), position};
    write_model(model_path(o.output_dir, step), header_of(model.config, dtype_of<X>()), params.data());
    write_state(state_path(o.output_dir, step), identity, sections(counters, adam));
    last_checkpoint = step;
    std::printf("checkpoint %s (and model_%08d.bin)\n", state_path(o.output_dir, step).c_str(), step);
    if (o.keep > 0) prune_checkpoints(o.output_dir, o.keep);
}

template <class Dev, class X>
bool Run<Dev, X>::restore() {
    const int newest = newest_checkpoint(o.output_dir);
    if (newest < 0) return false;
    const std::string path = model_path(o.output_dir, newest);
    std::vector<char> adam(model.adam.bytes), params(model.params.bytes);
    Counters counters{};
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
    dev.upload(model.adam.base, adam.data(), adam.size());
    dev.upload(model.params.base, params.data(), params.size());
    dev.sync();
    train.restore(position = counters.train);
    last_checkpoint = step = newest;
    return true;
}

// Creates the output directory; refuses one with an earlier run in it unless that is to be resumed.
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

// The defaults that depend on the device and the model; then, with the data known, those that depend on its size.
static void resolve_sizes(Options& o, const Config& config, bool on_cpu) {
    if (o.B == 0) o.B = on_cpu ? 4 : 8;
    if (o.T == 0) o.T = std::min(config.max_T, on_cpu ? 64 : 1024);
    const long long micro_batch = static_cast<long long>(o.B) * o.T;
    if (micro_batch > INT_MAX / 4)  // the encoder's plan counts in ints
        throw UsageError(
            format("B·T = %d·%d is too many tokens for a micro-batch: use a smaller -b with -d", o.B, o.T));
    if (o.tokens_per_step == 0) o.tokens_per_step = static_cast<int>(micro_batch);
    if (o.tokens_per_step % micro_batch)
        throw UsageError(format("--tokens-per-step %d is not a multiple of B·T = %d·%d = %lld", o.tokens_per_step, o.B,
                                o.T, micro_batch));
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

template <class Dev, class X>
int run_train(const Dev& dev, Options& o, const Config& config, bool from_file) {
    const bool on_cpu = std::is_same_v<Dev, Cpu>;
    resolve_sizes(o, config, on_cpu);
    // The model's tables first: what cannot be is said before data is touched.
    GPT2<Dev, X> model(dev, config, attention_of(o), o.B, o.T, o.tokens_per_step / (o.B * o.T), true, o.recompute);
    if (o.memory) return print_memory_table(model), 0;
    if (!o.output_dir.empty()) prepare_output_dir(o);
    const Data data = find_data(o);
    Run<Dev, X> run(dev, o, model, data);
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
    run.open_log();
    std::signal(SIGINT, on_signal);
    std::signal(SIGTERM, on_signal);

    if (run.step == 0) run.watch();
    while (run.step < o.max_steps && !g_signal) {
        if (o.profile && run.step == kProfileWarmUp) dev.profile(true);
        run.train_step();
        run.watch();
        if (o.checkpoint_every && run.step % o.checkpoint_every == 0) run.save();
    }
    if (o.profile) dev.profile(false);
    if (g_signal)
        std::printf("interrupted at step %d%s\n", run.step, o.output_dir.empty() ? ": no -o, so nothing is saved" : "");
    if (!o.output_dir.empty() && run.step > 0 && !run.saved()) run.save();
    return g_signal ? 128 + g_signal : 0;
}

// --eval-only: the loss over the whole validation data, and the answers to --hellaswag one by one.
template <class Dev, class X>
int run_evaluate(const Dev& dev, Options& o, const Config& config, bool from_file) {
    resolve_sizes(o, config, std::is_same_v<Dev, Cpu>);
    GPT2<Dev, X> model(dev, config, attention_of(o), o.B, o.T, 1, false);
    std::vector<Choice> choices;
    if (!o.hellaswag.empty()) choices = read_choices(o.hellaswag, config.V, o.T);
    std::unique_ptr<Loader> val;
    double floor = NAN;
    if (choices.empty() || !o.val_data.empty()) {
        const Data data = o.val_data.empty() ? find_data(o) : Data{"", o.val_data};
        if (data.val.empty()) throw UsageError("--eval-only with -i needs validation data: give it with -j");
        val = std::make_unique<Loader>(data.val, o.B, o.T, config.V, false, 0);
        floor = data.floor;
    }
    allocate_or_explain(model);
    start_weights(model, o, from_file);
    if (val) {
        const auto [loss, batches] = validate(model, *val, o.val_batches);
        std::printf("val loss %.6f over %llu batches of %d x %d tokens%s\n", loss,
                    static_cast<unsigned long long>(batches), o.B, o.T,
                    std::isnan(floor) ? "" : format(" | floor %.6f", floor).c_str());
    }
    const std::vector<std::vector<double>> losses = ending_losses(model, choices);
    for (size_t i = 0; i < choices.size(); i++) {
        std::printf("question %d | answer %d | label %d | losses", choices[i].index, answer(losses[i]),
                    choices[i].label);
        for (double loss : losses[i]) std::printf(" %.6f", loss);
        std::printf("\n");
    }
    const int correct = count_correct(losses, choices);
    if (!choices.empty())
        std::printf("hellaswag %d of %zu, %.2f%%\n", correct, choices.size(), 100.0 * correct / choices.size());
    return 0;
}

template <class Dev, class X>
int run_generate(const Dev& dev, const Options& o, const Config& config) {
    const int T = std::min(config.max_T, o.T ? o.T : 1024);
    GPT2<Dev, X> model(dev, config, attention_of(o), 1, T, 1, false);
    allocate_or_explain(model);
    model.load(o.init);
    const Tokenizer tokenizer = o.tokenizer.empty() ? Tokenizer() : Tokenizer(o.tokenizer);
    std::printf("%s\n", generate(model, tokenizer, o.prompt, o.generate, {o.temperature, o.top_k}, o.seed).c_str());
    return 0;
}

template <class Dev, class X>
int run_with(const Dev& dev, Options& o) {
    Config config;
    const bool preset = find_config(o.init, &config);
    if (!preset) {
        struct stat file;
        if (stat(o.init.c_str(), &file))
            throw UsageError(format("--init %s: neither d12, d24, d36, d48, tiny nor a file", o.init.c_str()));
        config = config_of(read_model_header(o.init));
    }
    if (preset) config.max_T = std::max(config.max_T, o.T);  // a new model has as many positions as it is asked for
    if (o.generate > 0) {
        if (preset) throw UsageError("--generate needs a trained model: give its checkpoint with -e");
        return run_generate<Dev, X>(dev, o, config);
    }
    if (o.eval_only) return run_evaluate<Dev, X>(dev, o, config, !preset);
    return run_train<Dev, X>(dev, o, config, !preset);
}

#ifndef TRAIN_GPT2_NO_MAIN
// Threads that spin while they wait for each other are fast on an idle machine and four times slower than sleeping ones
// where another program has one of the cores. OpenMP reads the choice before main: so start once more with it made.
static void wait_passively(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);  // returns only if it failed: then we go on as we are
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
        std::string why;
        const int gpus = o.device == "cpu" ? 0 : Cuda::count(&why);
        if (o.device == "cuda" && gpus == 0) throw Error("--device cuda: " + why + "; use --device cpu");
        if (gpus == 0) {
            wait_passively(argv);
            if (o.device == "auto") std::fprintf(stderr, "no usable GPU (%s): using the CPU\n", why.c_str());
            if (o.precision == "bf16") throw UsageError("--precision bf16 needs a GPU; the CPU runs fp32");
            if (o.init == "auto") o.init = "tiny";
            return run_with<Cpu, float>(Cpu(), o);
        }
        Cuda dev(0);
        dev.tf32 = !o.no_tf32 && dev.sm >= 80;
        dev.graphs = !o.no_graph && !o.profile;
        if (o.init == "auto") o.init = "d12";
        if (o.precision == "bf16" && dev.sm < 80)
            throw Error(
                format("--precision bf16 needs compute capability 8.0 or later, %s has %d.%d: use --precision fp32",
                       dev.name.c_str(), dev.sm / 10, dev.sm % 10));
        if (o.precision == "auto") o.precision = dev.sm >= 80 ? "bf16" : "fp32";
        return o.precision == "bf16" ? run_with<Cuda, bf16>(dev, o) : run_with<Cuda, float>(dev, o);
    });
}
#endif
