// llm.c's model files and our training state.
//
// A state file is a text head and bytes. The head has a line "name: value" for each of these, in
// this order, and ends with an empty line:
//
//   gpt2 training state, version 2
//   identity model: L=12 NH=12 …        what must be the same to resume, one line for each field
//   recipe -l: 0.0003                   what may be changed on purpose
//   step: 1000                          and the other counters
//   optimizer bytes: 995514368          m and v, in bf16 also the fp32 master weights, in the order
//                                       of the parameters
//   checksum: 0123456789abcdef          of the head up to this line, and of the bytes
//
#include "run/checkpoint_files.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "checkpoints are written as they lie in memory");

// -------------------------------------------------------------------------------------------------
// llm.c's model files

size_t Config::num_parameters() const {
    const size_t c = static_cast<size_t>(C);
    const size_t norm = 2 * c;
    const size_t qkv = 3 * c * c + 3 * c;
    const size_t attproj = c * c + c;
    const size_t fc = 4 * c * c + 4 * c;
    const size_t fcproj = 4 * c * c + c;
    return (Vp + max_T) * c + L * (norm + qkv + attproj + norm + fc + fcproj) + norm;
}

ModelHeader read_model_header(const std::string& path) {
    const InputFile file(path);
    constexpr char kAgain[] = "get the file again";
    int32_t h[kHeaderInts];
    file.read(0, h, kHeaderBytes);
    constexpr char kModel[] = "give a model_….bin of this program or of a current llm.c";
    if (h[0] != kModelMagic)
        refuse(path, "wrong magic at offset 0", kModelMagic, h[0], kModel);
    if (h[1] != 3 && h[1] != 5)
        refuse(path, "wrong version at offset 4", "3 (fp32) or 5 (bf16)", h[1], kModel);
    const ModelHeader header = {h[1] == 3 ? DType::f32 : DType::bf16,
                                {h[2], h[3], h[7], h[4], h[5], h[6]}};
    const Config& c = header.config;

    // Limits far above any GPT-2, so that sizes computed from a damaged header cannot overflow.
    const char* const names[] = {"maxT",  "vocabulary", "layers",
                                 "heads", "channels",   "padded vocabulary"};
    const int low[] = {1, 1, 1, 1, 1, c.V};
    const int high[] = {1 << 24, 1 << 24, 1 << 12, 1 << 12, 1 << 18, 1 << 24};
    for (int i = 0; i < 6; i++)
        if (h[2 + i] < low[i] || h[2 + i] > high[i])
            refuse(path, format("damaged header: %s at offset %d", names[i], 8 + 4 * i),
                   format("%d..%d", low[i], high[i]), h[2 + i], kAgain);
    if (c.C % c.NH)
        refuse(path, "damaged header: channels at offset 24",
               format("a multiple of %d heads", c.NH), c.C, kAgain);
    const size_t expected = kHeaderBytes + header.bytes();
    if (file.size != expected)
        refuse(path, file.size < expected ? "truncated" : "too long",
               format("%zu bytes (%s)", expected, words(header).c_str()), file.size, kAgain);
    return header;
}

void write_model(const std::string& path, const ModelHeader& header, const void* parameters) {
    const Config& c = header.config;
    const int version = header.dtype == DType::f32 ? 3 : 5;
    const int32_t h[kHeaderInts] = {kModelMagic, version, c.max_T, c.V, c.L, c.NH, c.C, c.Vp};
    write_whole_file(path, {{h, kHeaderBytes}, {parameters, header.bytes()}});
}

std::string words(const ModelHeader& header) {
    const Config& c = header.config;
    return format("%s, L=%d NH=%d C=%d V=%d", name_of(header.dtype), c.L, c.NH, c.C, c.V);
}

// -------------------------------------------------------------------------------------------------
// Training state

namespace {

const std::string kStateTitle = "gpt2 training state, version ";
constexpr int kStateVersion = 2;
constexpr size_t kMostHeadBytes = 1 << 16;
constexpr char kChecksum[] = "\nchecksum: ";
constexpr char kResumeFromAnother[] = "resume from another checkpoint or start anew";
constexpr char kOtherProgram[] = "resume with the program that wrote it";

std::string line(const std::string& name, const std::string& value) {
    return name + ": " + value + "\n";
}

// Of a head and the bytes behind it, which are yet to be added.
Checksum64 checksum_of(const std::string& head, size_t bytes) {
    return Checksum64(bytes, checksum64(head.data(), head.size()));
}

// The counters, one table for writing and for reading.
struct NamedCounter {
    const char* name;
    uint64_t* value;
};
std::vector<NamedCounter> named(Counters& counters) {
    return {{"step", &counters.step},
            {"model checksum", &counters.model_checksum},
            {"epoch", &counters.data.epoch},
            {"window", &counters.data.window},
            {"batches", &counters.data.batches}};
}

// A state file's head: the values by name, and what the checksum covers of it.
struct Head {
    std::map<std::string, std::string> values;
    std::string text;
    std::string checksum;
    size_t bytes = 0;  // with the empty line

    uint64_t number(const std::string& path, const std::string& name) const {
        const auto found = values.find(name);
        const std::string value = found == values.end() ? "nothing" : found->second;
        if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos)
            refuse(path, "damaged head: " + name, "a number", value, kResumeFromAnother);
        return std::strtoull(value.c_str(), nullptr, 10);
    }
};

Head read_head(const InputFile& file) {
    std::string text(std::min<size_t>(file.size, kMostHeadBytes), '\0');
    file.read(0, text.data(), text.size());
    if (text.compare(0, 8, "gpt2stat") == 0)
        refuse(file.path, "wrong version at offset 8", kStateVersion, "1", kOtherProgram);
    if (text.compare(0, kStateTitle.size(), kStateTitle))
        refuse(file.path, "wrong magic at offset 0", kStateTitle, "something else",
               "give a state file");
    const int version = std::atoi(text.c_str() + kStateTitle.size());
    if (version != kStateVersion)
        refuse(file.path, format("wrong version at offset %zu", kStateTitle.size()), kStateVersion,
               version, kOtherProgram);
    const size_t end = text.find("\n\n");
    const size_t checksum = text.rfind(kChecksum, end);
    if (end == std::string::npos || checksum == std::string::npos)
        refuse(file.path, "truncated or damaged",
               "a head that ends in a checksum and an empty line", "none", kResumeFromAnother);

    Head head;
    head.bytes = end + 2;
    head.text = text.substr(0, checksum + 1);
    head.checksum =
        text.substr(checksum + std::strlen(kChecksum), end - checksum - std::strlen(kChecksum));
    std::istringstream lines(head.text);
    for (std::string each; std::getline(lines, each);) {
        const size_t colon = each.find(": ");
        if (colon != std::string::npos)
            head.values[each.substr(0, colon)] = each.substr(colon + 2);
    }
    return head;
}

// The fields of a kind that differ, each as `say` puts it. A field that only one side has differs
// too, unless `implied` knows what a head without it means.
template <class Say>
void for_each_difference(const Head& head, const std::string& kind, const Fields& mine,
                         const Fields& implied, Say say) {
    std::map<std::string, std::string> had;
    for (const auto& [name, value] : head.values)
        if (name.compare(0, kind.size(), kind) == 0)
            had[name.substr(kind.size())] = value;
    for (const auto& [name, value] : implied)
        had.emplace(name, value);  // unless the head has it
    for (const auto& [name, value] : mine) {
        const auto found = had.find(name);
        const std::string before = found == had.end() ? "nothing" : found->second;
        if (before != value)
            say(name, before, value);
        had.erase(name);
    }
    for (const auto& [name, value] : had)
        say(name, value, "nothing");
}

}  // namespace

void write_state(const std::string& path, const Identity& identity, const Counters& counters,
                 Block optimizer) {
    std::string head = kStateTitle + std::to_string(kStateVersion) + "\n";
    for (const auto& [name, value] : identity.fields)
        head += line("identity " + name, value);
    for (const auto& [name, value] : identity.recipe)
        head += line("recipe " + name, value);
    Counters copy = counters;
    for (const auto& [name, value] : named(copy))
        head += line(name, std::to_string(*value));
    head += line("optimizer bytes", std::to_string(optimizer.bytes));
    Checksum64 checksum = checksum_of(head, optimizer.bytes);
    checksum.add(optimizer.data, optimizer.bytes);
    head += line("checksum", hex(checksum.value())) + "\n";
    write_whole_file(path, {{head.data(), head.size()}, optimizer});
}

StateFile::StateFile(const std::string& path, const Identity& identity, size_t optimizer_bytes)
    : file(path) {
    const Head head = read_head(file);
    const size_t has = head.number(path, "optimizer bytes");
    if (file.size != head.bytes + has)
        refuse(path, file.size < head.bytes + has ? "truncated" : "too long",
               format("%zu bytes", head.bytes + has), file.size, kResumeFromAnother);
    begin = head.bytes;
    expected_ = head.checksum;
    checksum_ = checksum_of(head.text, has);
    for (const auto& [name, value] : named(counters))
        *value = head.number(path, name);

    for_each_difference(
        head, "identity ", identity.fields, identity.implied,
        [&](const std::string& name, const std::string& had, const std::string& mine) {
            check_whole_file();  // a damaged head is not the user's fault
            throw Error(
                format("%s: checkpoint of another run: %s: the checkpoint has \"%s\", this "
                       "run has \"%s\"; give another -o",
                       path.c_str(), name.c_str(), had.c_str(), mine.c_str()));
        });
    if (has != optimizer_bytes) {
        check_whole_file();
        refuse(path, "optimizer", format("%zu bytes", optimizer_bytes), has,
               "resume with the same settings");
    }
    for_each_difference(
        head, "recipe ", identity.recipe, {},
        [&](const std::string& name, const std::string& had, const std::string& mine) {
            recipe_changes += recipe_changes.empty() ? "" : ", ";
            recipe_changes += name + " from " + had + " to " + mine;
        });
}

void StateFile::check() const {
    const std::string found = hex(checksum_.value());
    if (found != expected_)
        refuse(file.path, "damaged", expected_, found, kResumeFromAnother);
}

void StateFile::check_whole_file() {
    std::vector<char> piece(1 << 20);
    for (size_t at = begin; at < file.size; at += piece.size()) {
        piece.resize(std::min<size_t>(piece.size(), file.size - at));
        file.read(at, piece.data(), piece.size());
        add(piece.data(), piece.size());
    }
    check();
}

// -------------------------------------------------------------------------------------------------
// The checkpoints of a run

std::string model_path(const std::string& dir, int step) {
    return format("%s/model_%08d.bin", dir.c_str(), step);
}
std::string state_path(const std::string& dir, int step) {
    return format("%s/state_%08d.bin", dir.c_str(), step);
}

namespace {

// The files of `dir` that are named like a run's. There are none if there is no such directory.
struct RunFiles {
    std::set<int> models;
    std::set<int> states;
    std::vector<std::string> temporaries;  // paths, of runs that were killed

    int newest_model() const { return models.empty() ? -1 : *models.rbegin(); }
    int states_without_any_later_model() const {
        return static_cast<int>(std::distance(states.upper_bound(newest_model()), states.end()));
    }
    bool has_state(int step) const { return states.count(step) > 0; }
    bool has_model(int step) const { return models.count(step) > 0; }
};

RunFiles list_run_files(const std::string& dir) {
    static const std::regex pattern(
        "(?:(model|state)_([0-9]{8}|[1-9][0-9]{8,9})[.]bin|log[.]jsonl)([.]tmp[.][0-9]+)?");
    RunFiles files;
    std::error_code error;
    std::filesystem::directory_iterator entry(dir, error);
    if (error == std::errc::no_such_file_or_directory)
        return files;
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
        const std::string name = entry->path().filename();
        std::smatch part;
        if (!std::regex_match(name, part, pattern))
            continue;
        const long long step = part[2].matched ? std::stoll(part[2]) : 0;
        if (step > INT_MAX)
            continue;
        if (part[3].matched) {
            files.temporaries.push_back(entry->path());
            continue;
        }
        check_regular(entry->path());
        if (part[1] == "model")
            files.models.insert(static_cast<int>(step));
        if (part[1] == "state")
            files.states.insert(static_cast<int>(step));
    }
    if (error)
        throw file_error(dir, "list the directory", error.value());
    return files;
}

void remove_file(const std::string& path) {
    if (uninterrupted([&] { return unlink(path.c_str()); }) && errno != ENOENT)
        throw file_error(path, "remove", errno);
}

}  // namespace

int newest_model(const std::string& dir) {
    return list_run_files(dir).newest_model();
}

int checkpoint_to_resume(const std::string& dir) {
    const RunFiles files = list_run_files(dir);
    std::string without_state;
    for (auto step = files.models.rbegin(); step != files.models.rend(); ++step) {
        if (files.has_state(*step)) {
            if (without_state.empty())
                return *step;
            break;
        }
        without_state += (without_state.empty() ? "" : ", ") + model_path(dir, *step);
    }
    if (!without_state.empty())
        throw Error(format(
            "%s: without the training state that -y needs (such as %s); bring it back, move these "
            "models elsewhere, or start from one with -e and another -o",
            without_state.c_str(), state_path("", files.newest_model()).c_str() + 1));
    // A kill before the first model leaves one state. More are of models that somebody moved.
    if (files.models.empty() && files.states.size() > 1)
        throw Error(
            format("%s: has %zu states and no model; bring the models back, or give another -o",
                   dir.c_str(), files.states.size()));
    return -1;
}

void remove_leftovers(const std::string& dir) {
    const RunFiles files = list_run_files(dir);
    for (const std::string& path : files.temporaries)
        remove_file(path);
    const bool of_a_kill = files.states_without_any_later_model() == 1;
    for (const int step : files.states) {
        if (files.has_model(step))
            continue;
        const std::string path = state_path(dir, step);
        if (of_a_kill && step > files.newest_model())
            remove_file(path);
        else
            std::fprintf(stderr, "%s: has no model beside it, and is left as it is\n",
                         path.c_str());
    }
}

void prune_checkpoints(const std::string& dir, int keep, int keep_every) {
    if (keep == 0)
        return;
    const RunFiles files = list_run_files(dir);
    std::vector<int> steps;  // newest first
    for (auto step = files.models.rbegin(); step != files.models.rend(); ++step)
        if (files.has_state(*step))
            steps.push_back(*step);
    for (size_t i = keep; i < steps.size(); i++) {
        if (keep_every > 0 && steps[i] % keep_every == 0)
            continue;
        // The model goes first: if we are stopped before its state goes, no model is left without
        // one.
        remove_file(model_path(dir, steps[i]));
        remove_file(state_path(dir, steps[i]));
    }
}
