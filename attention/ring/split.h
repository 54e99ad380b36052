// Attention over sequences that are split over ranks: what the ring (ring.h) and the exchange of heads (heads.h) share.
#pragma once
#include <algorithm>

#include "layers/gpu/types.h"

// Which rank has what of a sequence. It is cut into 2N chunks, and rank r holds chunks r and 2N−1−r, an early one that
// sees little and a late one that sees much.
struct Zigzag {
    int ranks;
    int chunk(int rank, int half) const { return half == 0 ? rank : 2 * ranks - 1 - rank; }
    int owner(int chunk) const { return std::min(chunk, 2 * ranks - 1 - chunk); }
    int source(int rank, int step) const { return (rank - step + ranks) % ranks; }  // of the ring's keys at a step
    // True if any query of one chunk sees any key of the other. The mask cuts a pair only if both are the same chunk.
    static bool sees(int query_chunk, int key_chunk) { return key_chunk <= query_chunk; }
    // How many chunks of another rank's keys the queries of `rank` see at a step, which is both or only the early one.
    // The gradients of those keys reach the ranks that see both last. So until then nobody has added to the late
    // chunk's, and from then on every rank adds.
    int seen(int rank, int step) const { return sees(chunk(rank, 1), chunk(source(rank, step), 1)) ? 2 : 1; }
};

// A rank's part in it. Comm connects the ranks of one sequence, as in layers/comm/comm.h. A rank's tensors hold its
// 2·Tc tokens in the order (early chunk, late chunk). They are qkv (B, 2Tc, 3, NH, HS), out and dout (B, 2Tc, NH, HS)
// and dqkv as qkv. lse has B·NH·2Tc elements in an order of the form's own, for its backward.
template <class Dev, class X, class Comm = typename Dev::Comm>
class Split {
  public:
    using A = Acc<X>;
    virtual ~Split() = default;
    // Writes out and lse, every element.
    virtual void forward(X* out, A* lse, const X* qkv) = 0;
    // Writes dqkv, every element.
    virtual void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) = 0;

    // start() gives it memory of bytes(), which must be one whole allocation, and the communicator. Other ranks map
    // that memory, so nobody may free it before stop(), which all ranks call together.
    size_t bytes() {
        if (!bytes_) place(nullptr);
        return bytes_;
    }
    void start(void* memory, Comm* comm) {
        place(memory);
        comm_ = comm;
        if (zigzag_.ranks > 1) comm_->share(memory, bytes_);
    }
    void stop() {
        if (comm_ && zigzag_.ranks > 1) comm_->share(nullptr, 0);
        comm_ = nullptr;
    }

  protected:
    Split(const Dev& dev, int rank, int ranks) : dev_(dev), zigzag_{ranks}, rank_(rank) {}
    const Dev& dev_;
    const Zigzag zigzag_;
    const int rank_;
    Comm* comm_ = nullptr;

    // Calls take(pointer, n) for each of the buffers.
    virtual void buffers() = 0;
    template <class Y>
    void take(Y*& p, size_t n) {
        p = reinterpret_cast<Y*>(next_);
        next_ += (n * sizeof(Y) + 255) / 256 * 256;
    }

  private:
    uintptr_t next_ = 0;
    size_t bytes_ = 0;
    void place(void* memory) {
        next_ = reinterpret_cast<uintptr_t>(memory);
        buffers();
        bytes_ = next_ - reinterpret_cast<uintptr_t>(memory);
    }
};
