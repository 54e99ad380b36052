#include "run/data.h"

#include "common/threads.h"
#include "data/corpus.h"

std::future<void> begin_corpus(const Options& o) {
    const bool evaluates_files = o.eval_only && (!o.val_data.empty() || !o.hellaswag.empty());
    const bool other_data = !o.train_data.empty() || evaluates_files;
    if (other_data || o.memory || o.generate > 0)
        return {};
    return start_async([] { builtin_corpus(); });
}

Data find_data(const Options& o) {
    if (!o.train_data.empty())
        return {.train = o.train_data, .val = o.val_data};
    const Corpus& corpus = builtin_corpus();
    const Source train = {"built-in corpus", corpus.train};
    if (!o.val_data.empty())
        return {.train = train, .val = o.val_data};
    return {.train = train, .val = {"built-in corpus", corpus.val}, .floor = corpus.val_nats};
}
