#include "run/data.h"

#include "common/threads.h"
#include "data/corpus.h"

std::future<void> begin_corpus(const Options& o) {
    const bool other_data =
        !o.train_data.empty() || (o.eval_only && !(o.val_data.empty() && o.hellaswag.empty()));
    if (other_data || o.memory || o.generate > 0)
        return {};
    return start_async([] { builtin_corpus(); });
}

Data find_data(const Options& o) {
    if (!o.train_data.empty())
        return {o.train_data, o.val_data};
    const Corpus& corpus = builtin_corpus();
    const Source train = {"built-in corpus", corpus.train};
    if (!o.val_data.empty())
        return {train, o.val_data};
    return {train, {"built-in corpus", corpus.val}, corpus.val_nats};
}
