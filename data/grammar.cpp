// The grammar's notation read into tables, and the writer that walks them.
#include "data/grammar.h"

#include <cctype>
#include <cmath>

#include "data/random.h"
#include "layers/gpu/error.h"

namespace {

std::string trimmed(const std::string& s) {
    const size_t begin = s.find_first_not_of(' '), end = s.find_last_not_of(' ');
    return begin == std::string::npos ? "" : s.substr(begin, end - begin + 1);
}

// Splits at a separator outside of brackets.
std::vector<std::string> split(const std::string& s, const std::string& separator) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (size_t i = 0; i < s.size();) {
        depth += std::string("([{").find(s[i]) != std::string::npos;
        depth -= std::string(")]}").find(s[i]) != std::string::npos;
        if (depth == 0 && s.compare(i, separator.size(), separator) == 0) {
            parts.emplace_back();
            i += separator.size();
        } else {
            parts.back() += s[i++];
        }
    }
    for (std::string& part : parts) part = trimmed(part);
    return parts;
}

bool is_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

class Reader {
  public:
    Reader(Grammar& grammar, const std::string& source) : g_(grammar) {
        find_variables(source);
        for (size_t begin = 0; begin < source.size();) {
            const size_t end = std::min(source.find('\n', begin), source.size());
            add_line(source.substr(begin, end - begin));
            begin = end + 1;
        }
        add_line("#");
        for (const auto& [name, line] : mentioned_)
            if (g_.rules[g_.rule(name)].alternatives.empty()) fail(line, "no rule " + name);
        for (Rule& rule : g_.rules)
            for (const Alternative& a : rule.alternatives) rule.total += a.weight;
        for (Rule& rule : g_.rules)
            for (Alternative& a : rule.alternatives)
                for (Template& t : a.columns)
                    for (Symbol& s : t) find_column(s);
    }

  private:
    Grammar& g_;
    std::string line_;  // the logical line being read, and where in it
    size_t at_ = 0;
    enum { list, rule, table } form_ = list;
    int current_ = -1;
    std::vector<std::pair<std::string, std::string>> mentioned_;  // rule, line
    std::vector<std::string> columns_;                            // names of the columns that slots mention

    [[noreturn]] void fail(const std::string& line, const std::string& what) {
        throw Error("grammar: " + what + " in \"" + line.substr(0, 80) + "\"");
    }

    // A slot {x} is read before it is known whether some {x:rule} follows, so the variables come first.
    void find_variables(const std::string& source) {
        for (size_t i = 0; (i = source.find('{', i)) != std::string::npos;) {
            const size_t begin = ++i;
            while (is_name(source[i])) i++;
            if (source[i] == ':' && variable(source.substr(begin, i - begin)) < 0)
                g_.variables.push_back(source.substr(begin, i - begin));
        }
        g_.variable_rules.assign(g_.variables.size(), -1);
    }
    int variable(const std::string& name) const {
        for (size_t i = 0; i < g_.variables.size(); i++)
            if (g_.variables[i] == name) return static_cast<int>(i);
        return -1;
    }
    int find_or_add_rule(const std::string& name) {
        if (g_.rule(name) < 0) g_.rules.push_back({name, {""}, {}});
        return g_.rule(name);
    }

    // Joins continuation lines; a line is read when the next one starts.
    void add_line(const std::string& physical) {
        if (!physical.empty() && physical[0] == ' ') {
            line_ += " " + trimmed(physical);
            return;
        }
        if (!line_.empty() && line_[0] != '#') read_line();
        line_ = physical;
    }
    void read_line() {
        if (line_[0] == '@') {
            const size_t blank = line_.find(' '), colon = line_.find(':');
            const std::string form = line_.substr(0, blank);
            form_ = form == "@list" ? list : form == "@rule" ? rule : table;
            if (blank == std::string::npos || (form_ == table) != (colon != std::string::npos))
                fail(line_, "bad header");
            current_ = find_or_add_rule(trimmed(line_.substr(blank, colon - blank)));
            if (!g_.rules[current_].alternatives.empty()) fail(line_, "second definition");
            if (form_ == table) g_.rules[current_].columns = split(line_.substr(colon + 1), ",");
            return;
        }
        if (current_ < 0) fail(line_, "no header yet");
        if (form_ == list) {
            for (const std::string& item : split(line_, ","))
                if (!item.empty()) add(current_, 1, {item});
        } else if (form_ == rule) {
            const size_t blank = line_.find(' ');
            const int weight = std::atoi(line_.c_str());
            if (weight < 1 || blank == std::string::npos) fail(line_, "no weight");
            add(current_, weight, {line_.substr(blank + 1)});
        } else {
            std::vector<std::string> columns = split(line_, " | ");
            if (columns.size() != g_.rules[current_].columns.size()) fail(line_, "wrong number of columns");
            for (const std::string& first : split(columns[0], " / ")) {
                columns[0] = first;
                add(current_, 1, columns);
            }
        }
    }
    // Reading a template adds the rules written in place, so g_.rules may move.
    void add(int to, uint64_t weight, const std::vector<std::string>& columns) {
        Alternative alternative{weight, {}};
        const std::string line = line_;
        for (const std::string& column : columns) {
            line_ = column;
            at_ = 0;
            alternative.columns.push_back(read_template(""));
        }
        line_ = line;
        g_.rules[to].alternatives.push_back(alternative);
    }

    // Up to one of the `stop` characters, which stays.
    Template read_template(const std::string& stop) {
        static const std::string kBreak = " ¶ ";
        Template t;
        std::string literal;
        auto flush = [&] {
            if (!literal.empty()) t.push_back({Symbol::text, literal});
            literal.clear();
        };
        while (at_ < line_.size() && stop.find(line_[at_]) == std::string::npos) {
            const char c = line_[at_];
            if (line_.compare(at_, kBreak.size(), kBreak) == 0) {
                literal += '\n';
                at_ += kBreak.size();
            } else if (c == '{' || c == '(' || c == '[') {
                const size_t n = literal.size();
                const bool article = n >= 2 && literal[n - 1] == ' ' && std::tolower(literal[n - 2]) == 'a' &&
                                     (n == 2 || !is_name(literal[n - 3]));
                if (article && c == '[') fail(line_, "an option after \"a\"");
                if (article) literal.pop_back();
                flush();
                t.push_back(c == '{' ? read_slot() : c == '(' ? read_choice() : read_option());
                t.back().article = article;
            } else {
                literal += c;
                at_++;
            }
        }
        if (at_ >= line_.size() && !stop.empty()) fail(line_, "no closing " + stop);
        flush();
        return t;
    }
    Symbol read_choice() {  // (one|two)
        const int to = static_cast<int>(g_.rules.size());
        g_.rules.push_back({"", {""}, {}});
        do {
            at_++;
            const Alternative alternative{1, {read_template("|)")}};
            g_.rules[to].alternatives.push_back(alternative);
        } while (line_[at_] == '|');
        at_++;
        return {Symbol::choose, "", to};
    }
    Symbol read_option() {  // [30% text ]
        const int to = static_cast<int>(g_.rules.size());
        const int percent = std::atoi(line_.c_str() + at_ + 1);
        const size_t sign = line_.find("% ", at_);
        if (percent < 1 || percent > 99 || sign == std::string::npos) fail(line_, "an option without its percentage");
        at_ = sign + 2;
        g_.rules.push_back({"", {""}, {}});
        const Alternative alternative{static_cast<uint64_t>(percent), {read_template("]")}};
        g_.rules[to].alternatives = {alternative, {static_cast<uint64_t>(100 - percent), {Template{}}}};
        at_++;
        return {Symbol::choose, "", to};
    }
    Symbol read_slot() {  // {Name}, {name.column}, {name:rule.column!other}
        auto name = [&] {
            const size_t begin = ++at_;
            while (is_name(line_[at_])) at_++;
            return line_.substr(begin, at_ - begin);
        };
        Symbol s{Symbol::choose, ""};
        std::string first = name(), of, column;
        s.capital = std::isupper(static_cast<unsigned char>(first[0]));
        first[0] = static_cast<char>(std::tolower(first[0]));
        s.variable = variable(first);
        if (line_[at_] == ':') of = name();
        if (line_[at_] == '.') column = name();
        while (line_[at_] == '!') {
            s.others.push_back(variable(name()));
            if (s.others.back() < 0) fail(line_, "no such variable after !");
        }
        if (line_[at_++] != '}' || first.empty()) fail(line_, "bad slot");

        if (s.variable >= 0 && of.empty()) s.kind = column.empty() ? Symbol::again : Symbol::recall;
        if (s.kind == Symbol::choose) {
            const std::string target = of.empty() ? first : of;
            s.rule = find_or_add_rule(target);
            mentioned_.push_back({target, line_});
        }
        if (!of.empty()) {
            int& remembered = g_.variable_rules[s.variable];
            if (s.capital || (remembered >= 0 && remembered != s.rule)) fail(line_, "bad binding of " + first);
            remembered = s.rule;
        }
        if (!column.empty()) {
            s.column = static_cast<int>(columns_.size());
            columns_.push_back(column);
        } else {
            s.column = -1;
        }
        return s;
    }
    // Columns are looked up last: tables may be defined after their use.
    void find_column(Symbol& s) {
        if (s.kind == Symbol::text) return;
        if (s.kind != Symbol::choose) s.rule = g_.variable_rules[s.variable];
        for (int other : s.others)
            if (g_.variable_rules[other] != s.rule)
                fail(g_.rules[s.rule].name, g_.variables[other] + " remembers no row of it");
        const std::string name = s.column < 0 || g_.rules[s.rule].name.empty() ? "" : columns_[s.column];
        s.column = 0;
        if (name.empty()) return;
        const Rule& of = g_.rules[s.rule];
        while (of.columns[s.column] != name)
            if (++s.column == static_cast<int>(of.columns.size())) fail(of.name, "no column " + name);
    }
};

class Writer {
  public:
    Writer(const Grammar& grammar, uint64_t seed, uint64_t index)
        : g_(grammar), state_(mix64(mix64(seed) + index)), memory_(grammar.variables.size()) {}

    double nats = 0;

    void write(const Template& t, std::string& out) {
        for (const Symbol& s : t) {
            if (s.kind == Symbol::text) {
                out += s.literal;
                continue;
            }
            std::string piece;
            if (s.kind == Symbol::again)
                piece = remembered(s.variable).text;
            else if (s.kind == Symbol::recall)
                write(remembered(s.variable).row->columns[s.column], piece);
            else
                choose(s, piece);
            if (piece.empty()) continue;  // an option not taken
            if (s.article) out += starts_with_vowel(piece[0]) ? "n " : " ";
            if (s.capital) piece[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(piece[0])));
            out += piece;
        }
    }

  private:
    const Grammar& g_;
    uint64_t state_;
    struct Memory {
        const Alternative* row = nullptr;
        std::string text;
    };
    std::vector<Memory> memory_;

    const Memory& remembered(int variable) const {
        if (!memory_[variable].row) throw Error("grammar: " + g_.variables[variable] + " is not chosen yet");
        return memory_[variable];
    }

    uint64_t below(uint64_t n) {  // splitmix64, scaled by its high bits: off uniform by less than n/2⁶⁴
        const uint64_t bits = mix64(state_ += kGolden);
        return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * n >> 64);
    }

    void choose(const Symbol& s, std::string& piece) {
        const Rule& rule = g_.rules[s.rule];
        auto excluded = [&](const Alternative& a) {
            for (int other : s.others)
                if (remembered(other).row == &a) return true;
            return false;
        };
        uint64_t total = rule.total;
        if (!s.others.empty()) {
            for (const Alternative& a : rule.alternatives) total -= excluded(a) ? a.weight : 0;
        }
        uint64_t left = below(total);
        const Alternative* a = rule.alternatives.data();
        for (; excluded(*a) || left >= a->weight; a++) left -= excluded(*a) ? 0 : a->weight;
        nats += std::log(static_cast<double>(total) / static_cast<double>(a->weight));
        write(a->columns[s.column], piece);
        if (s.variable >= 0) memory_[s.variable] = {a, piece};
    }
};

}  // namespace

Grammar::Grammar(const std::string& source) {
    Reader(*this, source);
}

int Grammar::rule(const std::string& name) const {
    for (size_t i = 0; i < rules.size(); i++)
        if (rules[i].name == name) return static_cast<int>(i);
    return -1;
}

std::string Grammar::write(int rule, uint64_t seed, uint64_t index, double& nats) const {
    Writer writer(*this, seed, index);
    std::string text;
    Symbol root{Symbol::choose, ""};
    root.rule = rule;
    writer.write({root}, text);
    nats += writer.nats;
    return text;
}
