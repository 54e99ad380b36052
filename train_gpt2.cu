// GPT-2 training, top to bottom: tensors → forward → backward → update → training → main.
//
//   make train_gpt2cu && ./train_gpt2cu          trains a 124M model on the built-in corpus
//   ./train_gpt2cu --help                        lists every option
//
// The model is written once, for two backends and several types. `Dev` is the backend: Cuda
// (layers/, attention/) or Cpu (layers/cpu), which implement the same layer calls. `X` is the type
// in which weights and activations are stored: bf16 or float on CUDA, float on the CPU, and in
// tests also double. `A` = Acc<X> is the type of sums, statistics, gradients of weights and
// optimizer state. Everything around the step (options, batches, checkpoints, validation, samples,
// the log) is in run/.
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"
#include "parallel/process_group.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/buffers.h"
#include "run/collectives.h"
#include "run/inference.h"
#include "run/statistics.h"
#include "run/training.h"
#include "run/weights.h"
// This comes last, because its templates call both backends' attention.
#include "attention/ring/ring.h"

// =================================================================================================
// Tensors, one line each (run/tensors.h). each() lists a tensor that every layer has, once() a
// tensor of the whole model. The struct's pointers are those of one layer.
//
// Config (run/checkpoint_files.h) has a model's sizes: L layers, NH heads, C channels, V tokens in
// the vocabulary (padded to Vp), and max_T positions.

// The sixteen parameter tensors, in the order of llm.c's model files. P is X for the parameters
// themselves and A for their gradients.
template <class P>
struct Parameters {
    P *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb;
    P *ln2w, *ln2b, *fcw, *fcb, *fcprojw, *fcprojb, *lnfw, *lnfb;

    static TensorList list(const Config& c) {
        using S = Parameters;
        const size_t C = c.C;
        const size_t Vp = c.Vp;
        const size_t max_T = c.max_T;
        const int L = c.L;

        TensorList t;
        t.once("wte", &S::wte, {Vp, C}, kMatrix);
        t.once("wpe", &S::wpe, {max_T, C}, kTable);
        t.each("ln1w", &S::ln1w, C, L);
        t.each("ln1b", &S::ln1b, C, L);
        t.each("qkvw", &S::qkvw, {3 * C, C}, L, kMatrix);
        t.each("qkvb", &S::qkvb, 3 * C, L);
        t.each("attprojw", &S::attprojw, {C, C}, L, kMatrix);
        t.each("attprojb", &S::attprojb, C, L);
        t.each("ln2w", &S::ln2w, C, L);
        t.each("ln2b", &S::ln2b, C, L);
        t.each("fcw", &S::fcw, {4 * C, C}, L, kMatrix);
        t.each("fcb", &S::fcb, 4 * C, L);
        t.each("fcprojw", &S::fcprojw, {C, 4 * C}, L, kMatrix);
        t.each("fcprojb", &S::fcprojb, C, L);
        t.once("lnfw", &S::lnfw, C);
        t.once("lnfb", &S::lnfb, C);
        return t;
    }
};

// The results of forward, in N = B·T rows. In training every layer keeps its own for backward,
// except those that backward recomputes (Sizes::layers_unless_recomputed). With a KV cache every
// layer keeps its own qkv. Otherwise all layers share one tensor, which each overwrites.
template <class X>
struct Activations {
    using A = Acc<X>;
    X *encoded, *ln1, *qkv, *atty, *att, *residual2, *ln2, *fch, *act, *residual3, *lnf;
    A *ln1_mean, *ln1_rstd, *lse, *ln2_mean, *ln2_rstd, *lnf_mean, *lnf_rstd;

    static TensorList list(const Sizes& s) {
        using S = Activations;
        const size_t N = s.N;
        const size_t NC = N * s.C;
        const int L = s.layers();
        const int L_qkv = s.layers_of_qkv();
        const int L_norms = s.layers_unless_recomputed(kRecomputeNorms);
        const int L_act = s.layers_unless_recomputed(kRecomputeActivation);

        TensorList t;
        t.once("encoded", &S::encoded, NC);         // (N, C) wte + wpe
        t.each("ln1", &S::ln1, NC, L_norms);        // (N, C)
        t.each("ln1_mean", &S::ln1_mean, N, L);     // (N)
        t.each("ln1_rstd", &S::ln1_rstd, N, L);     // (N)
        t.each("qkv", &S::qkv, 3 * NC, L_qkv);      // (N, 3, NH, HS), also the KV cache
        t.each("atty", &S::atty, NC, L);            // (N, NH, HS)
        t.each("lse", &S::lse, s.lse, L);           // (B, NH, T), or as the ring keeps it
        t.each("att", &S::att, s.att, L);           // (B, NH, T, T), naive attention only
        t.each("residual2", &S::residual2, NC, L);  // (N, C) after attention
        t.each("ln2", &S::ln2, NC, L_norms);        // (N, C)
        t.each("ln2_mean", &S::ln2_mean, N, L);     // (N)
        t.each("ln2_rstd", &S::ln2_rstd, N, L);     // (N)
        t.each("fch", &S::fch, 4 * NC, L);          // (N, 4C) before the activation function
        t.each("act", &S::act, 4 * NC, L_act);      // (N, 4C) after it
        t.each("residual3", &S::residual3, NC, L);  // (N, C) after the MLP
        t.once("lnf", &S::lnf, NC);                 // (N, C)
        t.once("lnf_mean", &S::lnf_mean, N);        // (N)
        t.once("lnf_rstd", &S::lnf_rstd, N);        // (N)
        return t;
    }
};

// =================================================================================================
// The model

// How a model is used.
struct ModelSettings {
    // A kernel by its name, any that --attention accepts (common/types.h).
    Attention attention = Attention::flash;
    int B;                  // sequences in a micro-batch
    int T;                  // this rank's tokens of each sequence
    int micro_steps = 1;    // this rank's micro-batches in a step
    bool training = false;  // allocates gradients, optimizer state and what backward needs
    int recompute = kRecomputeNothing;  // a level of Recompute (run/buffers.h)
    bool cache = false;                 // keeps a KV cache, to generate text
};

template <class Device, class Storage>
struct GPT2 {
    using Dev = Device;
    using X = Storage;
    using A = Acc<X>;
    static constexpr bool has_master = !std::is_same_v<X, A>;

    const Dev& dev;
    const Config config;
    const ModelSettings settings;
    const Attention attention = settings.attention;
    const int B = settings.B;
    const int T = settings.T;
    const int micro_steps = settings.micro_steps;
    const bool training = settings.training;
    const int recompute = settings.recompute;
    const Ranks<Dev> ranks;
    const size_t num_parameters = config.num_parameters();
    std::unique_ptr<Ring<Dev, X>> ring;  // if several ranks share a sequence
    Sizes sizes;
    Arena params;
    Arena grads;
    Arena adam;
    Arena acts;
    Arena buffers;
    Arena ring_memory;
    typename Dev::Graph graph;  // of train_micro_batches()

    Parameters<X> weights(int l = 0) const { return params.pointers<Parameters<X>>(l); }
    Parameters<A> gradients(int l = 0) const { return grads.pointers<Parameters<A>>(l); }
    Activations<X> activations(int l = 0) const { return acts.pointers<Activations<X>>(l); }
    Optimizer<X> optimizer() const { return adam.pointers<Optimizer<X>>(); }
    Buffers<X> workspace() const { return buffers.pointers<Buffers<X>>(); }

    // All parameters and all gradients as one array each: these arenas have no gaps.
    X* all_parameters() const { return reinterpret_cast<X*>(params.base); }
    A* all_gradients() const { return reinterpret_cast<A*>(grads.base); }

    // ---------------------------------------------------------------------------------------------
    // Forward: device tokens (b, t) → lnf, the output of the final layer norm.

    struct ForwardCall {
        int b;
        int t;
        // The tokens follow `past` others, whose keys and values are in qkv, which is the KV cache.
        // So while a text grows token by token, each call computes a single row.
        int past = 0;
        // The tokens are whole sequences, not this rank's part of them; no other rank takes part.
        bool alone = false;
    };

    void forward(const int* tokens, const ForwardCall& call) {
        Range range("forward");
        const int b = call.b;
        const int t = call.t;
        const size_t N = size_t(b) * t;
        const int C = config.C;
        // The tensors outside of the layers.
        const Activations<X> outer_a = activations();
        const Parameters<X> outer_w = weights();
        const X* wpe = outer_w.wpe + size_t(call.past) * C;
        const Positions token_positions = call.alone ? Positions() : positions();

        encoder_forward(dev, outer_a.encoded, tokens, outer_w.wte, wpe, b, t, C, token_positions);
        const X* residual = outer_a.encoded;
        for (int l = 0; l < config.L; l++) {
            Range range("layer", l);
            const Activations<X> a = activations(l);
            const Parameters<X> w = weights(l);
            X* qkv = a.qkv + size_t(call.past) * 3 * C;

            layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N, C);
            matmul_forward(dev, qkv, a.ln1, w.qkvw, w.qkvb, N, C, 3 * C);
            attend(a, call);
            matmul_forward(dev, a.residual2, a.atty, w.attprojw, w.attprojb, N, C, C, residual);
            layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N,
                              C);
            matmul_activation_forward(dev, a.act, a.fch, a.ln2, w.fcw, w.fcb, N, C, 4 * C);
            matmul_forward(dev, a.residual3, a.act, w.fcprojw, w.fcprojb, N, 4 * C, C, a.residual2);

            residual = a.residual3;
            note_progress();
        }
        layernorm_forward(dev, outer_a.lnf, outer_a.lnf_mean, outer_a.lnf_rstd, residual,
                          outer_w.lnfw, outer_w.lnfb, N, C);
    }

    void attend(const Activations<X>& a, const ForwardCall& call) {
        if (ring && !call.alone)
            return ring->forward(a.atty, a.lse, a.qkv);
        attention_forward(dev, attention, a.atty, a.lse, a.att, a.qkv, call.b, call.t,
                          call.past + call.t, config.NH, config.HS());
    }

    // ---------------------------------------------------------------------------------------------
    // The classifier: the cross-entropy of every row of lnf, and its mean. The logits of all rows
    // would be the largest tensor of all, so they are computed for a chunk of rows at a time. That
    // is why their backward is here, too: it needs a chunk's logits while they exist.

    struct ClassifierCall {
        bool backward = false;    // also replaces lnf by its gradient, and computes wte's
        bool accumulate = false;  // adds wte's gradient to what is there
    };

    void classifier(const int* targets, A* mean_loss, const ClassifierCall& call) {
        Range range("loss");
        const size_t N = sizes.N;
        const int C = config.C;
        const int V = config.V;
        const int Vp = config.Vp;
        X* lnf = activations().lnf;
        const X* wte = weights().wte;
        const Buffers<X> buffers = workspace();
        void* scratch = buffers.scratch;
        // The gradient is that of the step's loss, a mean over all micro-batches of all ranks. 0
        // asks for no gradient.
        const A dloss = call.backward ? A(1) / (A(N) * num_losses()) : A(0);

        for (size_t first = 0; first < N; first += sizes.chunk) {
            const size_t n = std::min(sizes.chunk, N - first);
            X* x = lnf + first * C;       // (n, C)
            X* dlogits = buffers.logits;  // the logits at first, then their gradient
            cross_entropy(dev, dlogits, buffers.token_losses + first, scratch, x, wte,
                          targets + first, dloss, n, C, V, Vp);
            if (call.backward) {
                // dlogits and scratch are as cross_entropy() left them.
                X* dx = x;
                const bool accumulate = call.accumulate || first > 0;
                cross_entropy_backward(dev, dx, gradients().wte, scratch, dlogits, x, wte, n, C, Vp,
                                       accumulate);
            }
        }
        reduce_sum(dev, mean_loss, scratch, buffers.token_losses, A(1) / A(N), N);
    }

    // ---------------------------------------------------------------------------------------------
    // Backward: from lnf, which the classifier has replaced by its gradient, to the gradients of
    // all parameters.

    struct BackwardCall {
        // Adds the gradients of matmul weights to what is there, or overwrites it. All others are
        // always added, except v's bias gradient: it is written, but follows from a sum that
        // contains the earlier micro-batches.
        bool accumulate = false;
        // Also sums the gradients over all ranks. This is for the last micro-batch of a step.
        bool sum = false;
    };

    void backward(const int* plan, const BackwardCall& call) {
        Range range("backward");
        const size_t N = sizes.N;
        const int C = config.C;
        const Buffers<X> buffers = workspace();
        // The last layer's tensors, and with them those outside of the layers.
        const Activations<X> a = activations(config.L - 1);
        const Parameters<A> g = gradients(config.L - 1);
        const X* dlnf = a.lnf;  // the classifier has written it there

        // A layer norm's backward also sums the rows of the residual stream's gradient. The sum is
        // the bias gradient of the projection that was the last to add to the stream: here the last
        // layer's fcproj.
        dev.zero(buffers.dresidual, N * C * sizeof(X));
        layernorm_backward(dev, buffers.dresidual, g.lnfw, g.lnfb, g.fcprojb, buffers.scratch, dlnf,
                           a.residual3, weights().lnfw, a.lnf_mean, a.lnf_rstd, N, C);
        for (int l = config.L - 1; l >= 0; l--) {
            block_backward(l, call.accumulate);
            if (call.sum)
                sum_gradients(*this, l);
            note_progress();
        }
        encoder_backward(dev, g.wte, g.wpe, buffers.scratch, buffers.dresidual, plan, B, T, C,
                         positions());
        if (call.sum)
            sum_gradients(*this);
    }

    // Backward of layer l's transformer block: from the gradient of its output to that of its
    // input, both in dresidual.
    void block_backward(int l, bool accumulate) {
        Range range("layer", l);
        const size_t N = sizes.N;
        const int C = config.C;
        const Activations<X> a = activations(l);
        const Parameters<X> w = weights(l);
        const Parameters<A> g = gradients(l);
        const X* residual = l > 0 ? activations(l - 1).residual3 : a.encoded;
        A* fcprojb_below = l > 0 ? gradients(l - 1).fcprojb : nullptr;

        const Buffers<X> buffers = workspace();
        void* scratch = buffers.scratch;
        X* dresidual = buffers.dresidual;
        const bool recomputes_act = recompute >= kRecomputeActivation;
        const bool recomputes_norms = recompute >= kRecomputeNorms;

        // Two buffers, each for several gradients in turn.
        // (N, C): dln2, then datty, then dln1. lnf's memory is free: its gradient has been used.
        X* narrow = a.lnf;
        // (N, 4C): dfch, then dqkv, in act's memory. But if act is recomputed, one call writes both
        // act and dfch, so `wide` is the memory of the logits, which the classifier has used.
        X* wide = recomputes_act ? buffers.logits : a.act;

        // Only the weight's gradient: matmul_activation_backward() below continues to dfch. This
        // reads act, so it runs before dfch overwrites act, or after act has been recomputed.
        const auto fcproj_weight_gradient = [&] {
            X* const no_dact = nullptr;
            const X* const no_weight = nullptr;  // only dact would need it
            matmul_backward<X>(dev, no_dact, g.fcprojw, dresidual, a.act, no_weight, N, 4 * C, C,
                               accumulate);
        };
        if (!recomputes_act)
            fcproj_weight_gradient();
        X* dfch = wide;
        X* recomputed_act = recomputes_act ? a.act : nullptr;
        matmul_activation_backward(dev, dfch, g.fcb, recomputed_act, scratch, dresidual, w.fcprojw,
                                   a.fch, N, 4 * C, C);
        if (recomputes_act)
            fcproj_weight_gradient();

        if (recomputes_norms)
            layernorm_forward(dev, a.ln2, a.ln2_mean, a.ln2_rstd, a.residual2, w.ln2w, w.ln2b, N,
                              C);
        X* dln2 = narrow;
        matmul_backward(dev, dln2, g.fcw, dfch, a.ln2, w.fcw, N, C, 4 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln2w, g.ln2b, g.attprojb, scratch, dln2, a.residual2,
                           w.ln2w, a.ln2_mean, a.ln2_rstd, N, C);

        X* datty = narrow;
        X* dqkv = wide;
        matmul_backward(dev, datty, g.attprojw, dresidual, a.atty, w.attprojw, N, C, C, accumulate);
        attend_backward(dqkv, datty, a, scratch);

        if (recomputes_norms)
            layernorm_forward(dev, a.ln1, a.ln1_mean, a.ln1_rstd, residual, w.ln1w, w.ln1b, N, C);
        // v's bias gradient follows from the projection's (layers.h).
        qkv_bias_backward(dev, g.qkvb, scratch, dqkv, g.attprojb, w.attprojw, N, C);
        X* dln1 = narrow;
        matmul_backward(dev, dln1, g.qkvw, dqkv, a.ln1, w.qkvw, N, C, 3 * C, accumulate);
        layernorm_backward(dev, dresidual, g.ln1w, g.ln1b, fcprojb_below, scratch, dln1, residual,
                           w.ln1w, a.ln1_mean, a.ln1_rstd, N, C);
    }

    void attend_backward(X* dqkv, const X* datty, const Activations<X>& a, void* scratch) {
        if (ring)
            return ring->backward(dqkv, datty, a.atty, a.lse, a.qkv);
        attention_backward(dev, attention, dqkv, scratch, datty, a.atty, a.lse, a.att, a.qkv, B, T,
                           config.NH, config.HS());
    }

    // ---------------------------------------------------------------------------------------------
    // A step: upload() its micro-batches, train_micro_batches(), update().

    // A micro-batch is an array of ints: N tokens, N targets, and the plan of the encoder's
    // backward.
    size_t batch_ints() const {
        const size_t N = size_t(B) * T;  // not sizes.N: tensor_sizes() calls this
        return 2 * N + encoder_plan_ints(dev, N);
    }
    const int* tokens(int i) const { return workspace().batch + i * batch_ints(); }
    const int* targets(int i) const { return tokens(i) + sizes.N; }
    const int* plan(int i) const { return tokens(i) + 2 * sizes.N; }
    A* micro_batch_loss(int i) const { return statistics().losses_of(ranks.rank) + i; }

    void fill_batch(int* host, Loader& loader) const {
        read_micro_batch(*this, host, loader);
        if (training)
            encoder_plan(dev, host + 2 * sizes.N, host, sizes.N);
    }

    void upload(const int* host, int micro_batches) {
        dev.upload(workspace().batch, host, size_t(micro_batches) * batch_ints() * sizeof(int));
    }

    // Writes zeros to all gradients except those of the matmul weights, which the first micro-batch
    // overwrites. Whatever lies between two matmul weights is cleared at once.
    void clear_gradients() {
        size_t begin = 0;  // where the last matmul weight ends, in bytes
        const auto clear_until = [&](size_t end) {
            if (end > begin)
                dev.zero(grads.base + begin, end - begin);
        };
        for (size_t i = 0; i < grads.tensors.size(); i++) {
            if (!grads.tensors[i].is_matrix())
                continue;
            clear_until(grads.offsets[i]);
            begin = grads.offsets[i] + grads.tensors[i].elements() * sizeof(A);
        }
        clear_until(grads.bytes);
    }

    // `sum`: as in BackwardCall.
    void train_micro_batch(int i, bool sum = false) {
        const bool accumulate = i > 0;
        if (!accumulate)
            clear_gradients();
        forward(tokens(i), {.b = B, .t = T});
        classifier(targets(i), micro_batch_loss(i), {.backward = true, .accumulate = accumulate});
        backward(plan(i), {.accumulate = accumulate, .sum = sum});
    }

    void train_micro_batches() {
        Range range("forward and backward");
        const bool several_ranks = ranks.size > 1;
        graph.run(dev, [&] {
            for (int i = 0; i < micro_steps; i++) {
                const bool is_last = i + 1 == micro_steps;
                train_micro_batch(i, several_ranks && is_last);
            }
            if (several_ranks)
                gather_losses(*this);
        });
    }

    void evaluate_micro_batch(int i) {
        forward(tokens(i), {.b = B, .t = T});
        classifier(targets(i), micro_batch_loss(i), {.backward = false});
    }

    // If a loss or the gradient's norm is not finite, nothing is updated. The caller sees that in
    // the norm.
    void update(const AdamW& hyper) {
        Range range("update");
        const Buffers<X> buffers = workspace();
        const Optimizer<X> state = optimizer();
        A* g = gradients_to_update(*this);
        A* gate = g + sizes.own_parameters;

        // 0·losses: 0, or NaN if a loss is not finite. Then the norm is NaN too, and adamw_update()
        // does nothing.
        reduce_sum(dev, gate, buffers.scratch, statistics().losses(), A(0), num_losses());
        const A* norm = norm_of_gradients(*this, g, sizes.own_parameters + kGateElements);
        dev.mark();  // the host reads losses, norm and stop flags while the update runs

        const std::vector<ParamRange> own = share(ranks.rank);
        adamw_update(dev, all_parameters(), state.master, state.m, state.v, g, norm, own.data(),
                     static_cast<int>(own.size()), hyper);
        if (ranks.sharded)
            gather_parameters(*this);
    }

    DeviceStatistics<A> statistics() const {
        return {.base = workspace().stats,
                .ranks = size_t(ranks.size),
                .micro_steps = size_t(micro_steps)};
    }
    // Of a step: one per micro-batch of all ranks.
    size_t num_losses() const { return statistics().num_losses(); }
    // (N) of the last micro-batch: one per token.
    A* token_losses() const { return workspace().token_losses; }

    // ---------------------------------------------------------------------------------------------
    // Making a model. The constructor only computes sizes; allocate() allocates the memory. Until
    // then all pointers to tensors are null or meaningless.

    GPT2(const Dev& dev, const Config& config, const ModelSettings& settings,
         const Ranks<Dev>& ranks = {})
        : dev(dev), config(config), settings(settings), ranks(ranks) {
        if (sequence_length() > config.max_T)
            throw Error(format("T = %d exceeds the model's %d positions; use -t %d or less",
                               sequence_length(), config.max_T, config.max_T));
        check_attention<X>(dev, attention, config.HS(),
                           {.training = training, .context_parallel = ranks.context > 1});
        if (ranks.context > 1)
            ring = std::make_unique<Ring<Dev, X>>(
                dev, RingRank{.rank = ranks.context_rank(), .ranks = ranks.context},
                attention_shape(), attention);
        sizes = tensor_sizes();

        constexpr size_t kPacked = 1;  // a multiple of 1 byte: no gaps
        // For AdamW's vectors. A checkpoint of several shards is put together as if their arrays
        // had no gaps (run/optimizer_state.h). They have none, because shares are whole vectors
        // (can_shard()). With one shard there may be gaps, which a checkpoint then contains.
        constexpr size_t kVectorAligned = 16;
        params = Arena("parameters", Parameters<X>::list(config), kPacked);
        if (training) {
            TensorList list = Parameters<A>::list(config);
            list.push_back({.name = "gate",  // gets 0·losses
                            .dtype = dtype_of<A>(),
                            .rows = 1,
                            .cols = kGateElements});
            grads = Arena("gradients", list, kPacked);
            adam = Arena("optimizer", Optimizer<X>::list(sizes), kVectorAligned);
        }
        acts = Arena("activations", Activations<X>::list(sizes));
        buffers = Arena("buffers", Buffers<X>::list(sizes));
        if (ring)
            ring_memory = Arena(
                "ring",
                {{.name = "ring", .dtype = DType::i32, .rows = 1, .cols = ring->bytes() / 4}});
    }
    ~GPT2() {
        for (Arena* a : arenas())
            dev.free(a->base);
    }
    GPT2(const GPT2&) = delete;
    GPT2& operator=(const GPT2&) = delete;

    void allocate() {
        for (Arena* a : arenas())
            if (a->bytes)
                a->base = static_cast<char*>(dev.alloc(a->bytes));
        if (ring)
            ring->start(ring_memory.base, ranks.context_comm.get());
        if (adam.base)
            dev.zero(adam.base, adam.bytes);
    }

    std::array<Arena*, 6> arenas() {
        return {&params, &grads, &adam, &acts, &buffers, &ring_memory};
    }

    size_t total_bytes() {
        size_t bytes = 0;
        for (Arena* a : arenas())
            bytes += a->bytes;
        return bytes;
    }

    Sizes tensor_sizes() const {
        const size_t N = size_t(B) * T;
        const int C = config.C;
        const AttentionShape shape = attention_shape();

        Sizes s;
        s.training = training;
        s.cache = settings.cache;
        s.recompute = recompute;

        s.L = config.L;
        s.N = N;
        s.C = C;
        s.Vp = config.Vp;
        s.lse = ring ? ring->lse_elements() : N * config.NH;
        s.att = attention_saved_bytes<X>(dev, attention, shape) / sizeof(X);
        s.chunk = classifier_chunk(N);

        s.ranks = ranks.size;
        s.stats = statistics().elements();
        s.batch = micro_steps * batch_ints();
        s.own_parameters = num_parameters / shards();
        s.own_gradients = (training && ranks.sharded) ? s.own_parameters + kGateElements : 0;
        // Enough for count_nonfinite() and checksum(), which need 8 bytes.
        constexpr size_t kLeastScratch = 256;
        s.scratch =
            std::max({ring ? 0 : attention_scratch_bytes<X>(dev, attention, shape),
                      encoder_scratch_bytes(dev, B, T, C), layernorm_scratch_bytes(dev, C),
                      qkv_bias_scratch_bytes(dev, C),
                      matmul_activation_scratch_bytes(dev, N, 4 * C, C), reduce_scratch_bytes(dev),
                      kLeastScratch, cross_entropy_scratch_bytes<X>(dev, s.chunk, C, config.Vp)});
        return s;
    }

    // The rows of logits that exist at once, at most 2 GiB of them. Every chunk adds to the whole
    // gradient of wte, so a few large chunks are best.
    size_t classifier_chunk(size_t rows) const {
        constexpr size_t kMostBytes = size_t(2) << 30;
        size_t chunk = 512;
        while (chunk < rows && 2 * chunk * config.Vp * sizeof(X) <= kMostBytes)
            chunk *= 2;
        return std::min(chunk, rows);
    }

    AttentionShape attention_shape() const {
        return {.B = B, .Tq = T, .Tk = T, .NH = config.NH, .HS = config.HS()};
    }

    // The positions of this rank's tokens in their sequence.
    Positions positions() const {
        if (!ring)
            return {};
        const Zigzag zigzag{ranks.context};
        const int chunk_size = T / 2;
        const int rank = ranks.context_rank();
        return {.chunk = chunk_size,
                .early = zigzag.chunk(rank, 0) * chunk_size,
                .late = zigzag.chunk(rank, 1) * chunk_size};
    }

    // Whether matmuls run in TF32.
    bool tf32() const { return dev.tf32 && std::is_same_v<X, float>; }
    // The tokens of a whole sequence, on all ranks that share it.
    int sequence_length() const { return T * ranks.context; }
    // The shards of the optimizer, and a rank's share of the parameters.
    int shards() const { return ranks.sharded ? ranks.size : 1; }
    std::vector<ParamRange> share(int rank) const {
        return share_of(params.tensors, rank, shards(), ranks.overlap);
    }
};

// =================================================================================================
// The training loop. A Run (run/training.h) is the model and what accompanies it: the data, the
// log, the checkpoints.

template <class Model>
void train_step(Run<Model>& run) {
    Range range("step", run.step);
    Model& model = run.model;
    run.begin_step();  // starts the clock
    model.upload(run.batches.current(), model.micro_steps);
    model.train_micro_batches();
    run.prepare_next_batches();  // while the GPU works
    run.stop.send_flag();        // in time for the dev.mark() in update()
    model.update(run.o.adamw(run.step));
    run.end_step();  // waits for the mark, then prints and logs the loss
}

constexpr int kProfileWarmUp = 5;  // steps before those that --profile records

template <class Model>
void train(Run<Model>& run) {
    const Options& o = run.o;
    if (run.step == 0)
        run.evaluation.run_if_due(run.step);

    while (run.goes_on()) {
        if (o.profile && run.step == kProfileWarmUp)
            run.dev.profile(true);
        train_step(run);
        run.evaluation.run_if_due(run.step);
        run.checkpoints.save_if_due(run.step);
    }

    if (o.profile)
        run.dev.profile(false);
    if (run.stop.signal())
        std::printf("interrupted at step %d\n", run.step);
    run.checkpoints.save_at_the_end(run.step);
    run.stop.defer_error([&] { run.log.retry(); });  // an earlier error comes first
    run.stop.rethrow();
    run.conclude();
}

// Gives the model its parameters: those of the newest checkpoint with -y, else those of -e.
template <class Model>
void restore_or_init(Run<Model>& run, bool from_file) {
    const Options& o = run.o;
    if (o.resume && run.restore()) {
        std::printf("resumed at step %d\n", run.step);
    } else {
        if (from_file)
            load(run.model, o.init);
        else
            init_random(run.model, o.seed);
        if (o.resume)
            std::printf("nothing to resume: starting at step %d\n", run.step);
    }
    if (o.resume && run.step >= o.max_steps)
        std::printf("nothing left to do; raise -x, which is %d\n", o.max_steps);
}

template <class Dev, class X>
int run_train(const Dev& dev, Options& o, const Config& config, bool from_file, Ranks<Dev> ranks) {
    const bool on_cpu = std::string(Dev::kind) == "cpu";
    resolve_sizes(o, config.max_T, config.C, on_cpu, ranks.size);
    if (o.overlap < 0)
        o.overlap = ranks.local_size < ranks.size;  // on several machines
    ranks.sharded = o.zero > 0 && ranks.size > 1;
    ranks.overlap = o.overlap > 0;

    // The constructor refuses what is impossible, so it runs before any data is read. It allocates
    // nothing.
    GPT2<Dev, X> model(dev, config,
                       {.attention = {o.attention},
                        .B = o.B,
                        .T = o.T / ranks.context,
                        .micro_steps = o.tokens_per_step / (o.B * o.T * ranks.groups()),
                        .training = true,
                        .recompute = o.recompute},
                       ranks);
    if (o.memory) {
        print_memory_table(model);
        return 0;
    }

    std::unique_ptr<OutputDir> output;  // null on ranks that write no files
    if (!o.output_dir.empty() && ranks.rank == 0)
        output = prepare_output_dir(o);
    const Data data = find_data(o);
    const Tokenizer tokenizer(o.tokenizer);
    Loader train_loader = training_loader(o, data.train, config.V, tokenizer);

    // The last of the options. From here on they are constant.
    if (!can_generate(config.V))
        o.sample_every = 0;
    if (o.profile)
        o.max_steps = kProfileWarmUp + o.profile;
    resolve_steps(o, on_cpu, train_loader.windows());

    Run<GPT2<Dev, X>> run(o, model, data, tokenizer, std::move(train_loader));
    run.describe();
    return run_rank(ranks, [&] {
        allocate_or_explain(model);
        restore_or_init(run, from_file);
        run.check_ranks_agree();
        run.open_log(output.get());
        catch_signals();
        train(run);
        return run.stop.signal() ? 128 + run.stop.signal() : 0;
    });
}

// =================================================================================================
// From the command line to a run

// The vocabulary of `tiny` is only a default: new_model() makes it what the data needs.
std::optional<Config> preset_config(const std::string& name) {
    static const std::map<std::string, Config> presets = {
        {"tiny", {.max_T = 256, .V = kByteVocab, .Vp = 384, .L = 4, .NH = 2, .C = 128}},
        {"d12", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 12, .NH = 12, .C = 768}},
        {"d24", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 24, .NH = 16, .C = 1024}},
        {"d36", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 36, .NH = 20, .C = 1280}},
        {"d48", {.max_T = 1024, .V = 50257, .Vp = 50304, .L = 48, .NH = 25, .C = 1600}},
    };
    const auto preset = presets.find(name.starts_with("gpt2:") ? name.substr(5) : name);
    if (preset == presets.end())
        return std::nullopt;
    return preset->second;
}

// A new model has at least -t positions. With tiny's byte vocabulary it has the vocabulary that
// training and validation data need, which is single bytes or GPT-2's.
Config new_model(const Config& preset, const Options& o) {
    Config config = preset;
    config.max_T = std::max(config.max_T, o.T);
    if (config.V == kByteVocab) {
        for (const std::string& data : {o.train_data, o.val_data})
            if (!data.empty())
                config.V = std::max(config.V, vocabulary_of(data, !o.tokenizer.empty()));
        config.Vp = (config.V + 127) / 128 * 128;
    }
    return config;
}

// The model file that --init names, which may also be the output directory of a run.
std::string find_model_file(const std::string& init) {
    struct stat file;
    if (stat(init.c_str(), &file))
        throw UsageError(format(
            "--init %s: there is no such file or directory, and no model of that name; give d12, "
            "d24, d36, d48, tiny, a model file or the -o of a run",
            init.c_str()));
    if (!S_ISDIR(file.st_mode))
        return init;
    const int newest = newest_model(init);
    if (newest < 0)
        throw UsageError(
            format("--init %s: this directory has no checkpoint; give a model file", init.c_str()));
    return model_path(init, newest);
}

template <class Dev, class X>
int run_with(const Dev& dev, Options& o, const ProcessGroup& group) {
    const std::optional<Config> preset = preset_config(o.init);
    const bool from_file = !preset.has_value();
    if (from_file)
        o.init = find_model_file(o.init);
    const Config config = from_file ? read_model_header(o.init).config : new_model(*preset, o);
    if (from_file && config.V >= kGpt2Vocab && o.tokenizer.empty() && group.prints())
        print_error(o.init +
                    ": text is read and written as single bytes; for GPT-2's tokens give "
                    "--tokenizer");

    if (o.generate > 0) {
        if (!from_file)
            throw UsageError("--generate needs a trained model; give its checkpoint with -e");
        return run_generate<GPT2<Dev, X>>(dev, o, config);
    }
    Ranks<Dev> ranks = connect(dev, group, o.context_parallel);
    if (o.eval_only)
        return run_evaluate<GPT2<Dev, X>>(dev, o, config, from_file, ranks);
    return run_train<Dev, X>(dev, o, config, from_file, ranks);
}

#ifndef TRAIN_GPT2_NO_MAIN  // defined by tests and benchmarks that include this file
// "COMMIT clean", "COMMIT dirty" or "unknown dirty", by the Makefile
extern const char built_from[];

// Chooses the backend and the type. `gpus` is the number of GPUs on this machine, or 0 to use the
// CPU.
static int run_on_device(Options& o, const ProcessGroup& group, int gpus) {
    if (gpus == 0) {
        if (o.precision == "bf16")
            throw UsageError("--precision bf16 needs a GPU; on a CPU use fp32");
        if (o.init.empty())
            o.init = "tiny";
        return run_with<Cpu, float>(Cpu(), o, group);
    }

    Cuda dev(group.device(gpus));
    if (group.prints())
        std::fputs(missing_kernels(dev.sm, dev.sm90a), stderr);
    dev.tf32 = !o.no_tf32 && dev.sm >= 80;
    dev.graphs = !o.profile;
    if (o.init.empty())
        o.init = "d12";
    if (o.precision == "bf16" && dev.sm < 80)
        throw Error(
            format("--precision bf16 needs compute capability 8.0 or later, but %s has %d.%d; use "
                   "--precision fp32",
                   dev.name.c_str(), dev.sm / 10, dev.sm % 10));
    if (o.precision == "auto")
        o.precision = dev.sm >= 80 ? "bf16" : "fp32";
    return o.precision == "bf16" ? run_with<Cuda, bf16>(dev, o, group)
                                 : run_with<Cuda, float>(dev, o, group);
}

static void print_version() {
    const bool known = std::string(built_from, 7) != "unknown";
    std::printf("train_gpt2cu 1.0%s%s\n", known ? ", commit " : "", known ? built_from : "");
}

static void print_help() {
    const char* const about =
        "Trains GPT-2. Without options, it trains a new 124M model (CPU: tiny) on the built-in "
        "corpus,\nand saves nothing. README.md has examples. --version prints the version.";
    std::printf("%s", options_help("train_gpt2cu", about, Options().table()).c_str());
}

static void check_options(const Options& o, const std::vector<Option>& table) {
    check_all_are_used(o, table);
    if (o.output_dir.empty() && (o.resume || o.checkpoint_every || o.keep || o.keep_every))
        throw UsageError("-y, -n, -nk and -nm need a directory; give it with -o");
    if (o.eval_only && o.init.empty())
        throw UsageError("--eval-only needs a model; give its checkpoint with -e");
}

// One rank of a job, or a whole job that starts its ranks.
static int run_process(Options& o, char** argv) {
    std::string why_no_gpu;
    const int gpus = o.device == "cpu" ? 0 : Cuda::count(&why_no_gpu);
    if (o.device == "cuda" && gpus == 0)
        throw Error("--device cuda: " + why_no_gpu + "; use --device cpu");
    const RankInfo self = rank_from_environment();
    check_ranks(o, self, gpus, why_no_gpu);
    if (o.gpus > 1 && self.size == 1 && !o.memory)
        return launch_ranks(o.gpus, argv);

    // The built-in corpus is made while the device starts. The future is kept because its
    // destructor waits for the thread.
    [[maybe_unused]] const std::future<void> corpus = begin_corpus(o);
    if (gpus == 0 && o.device == "auto" && self.rank == 0)
        print_error("no usable GPU (" + why_no_gpu + "); using the CPU");
    try {
        // With --memory the group has --gpus ranks, of which only this one is started.
        ProcessGroup group(self, std::max(o.gpus, self.size));
        if (group.size > 1 && !o.memory)
            group.rendezvous(self, options_settings(o.table()), o.first_timeout());
        return run_on_device(o, group, gpus);
    } catch (const UsageError&) {
        // All ranks have the same error, so rank 0 alone reports it.
        if (self.rank == 0)
            throw;
        return 2;
    }
}

int main(int argc, char** argv) {
    prepare_process();
    return check_stdout(run_program("train_gpt2cu", [&] {
        if (std::find(argv, argv + argc, std::string("--version")) != argv + argc) {
            print_version();
            return 0;
        }
        Options o;
        o.program = argv[0];
        std::vector<Option> table = o.table();
        if (parse_options(argc, argv, table) == Parsed::help) {
            print_help();
            return 0;
        }
        check_options(o, table);
        return run_process(o, argv);
    }));
}
#endif
